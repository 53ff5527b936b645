"""`kvweave docs`: look at, search and remove what a knowledge base holds."""

import json
import time
from pathlib import Path
from typing import Any

import click

from kvweave.cli.amounts import progress_text
from kvweave.cli.knowledge_bases import find_embedder
from kvweave.cli.options import api_key_option, json_option, kb_option, pass_config
from kvweave.config import EffectiveConfig
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.search import MODES, Mode


@click.group()
def command() -> None:
    """List, show, search and remove documents."""


@command.command("ls")
@kb_option
@json_option
def ls_command(kb_folder: Path, as_json: bool) -> None:
    """List the documents."""
    with KnowledgeBase.open(kb_folder) as kb:
        documents, totals = kb.documents(), kb.totals()
    if as_json:
        rows = [document._asdict() for document in documents]
        click.echo(json.dumps({"documents": rows, "totals": totals._asdict()}))
        return
    table = _table("id", "title", "chunks", "tokens", "added", "source")
    for document in documents:
        table.add_row(
            document.id[:8],
            document.title[:60],
            f"{document.num_chunks:,}",
            f"{document.num_tokens:,}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(document.added_at)),
            document.source,
        )
    _print(table)
    click.echo(f"{totals.num_documents:,} documents, {totals.num_chunks:,} chunks")


@command.command("status")
@kb_option
@json_option
def status_command(kb_folder: Path, as_json: bool) -> None:
    """What is in it, and how far its chunk KV is."""
    from kvweave.app.library.kv_progress import progress_on_disk

    with KnowledgeBase.open(kb_folder) as kb:
        totals, progress = kb.totals(), progress_on_disk(kb)
    if as_json:
        click.echo(json.dumps({"totals": totals._asdict(), "kv": progress._asdict()}))
        return
    click.echo(
        f"{totals.num_documents:,} documents, {totals.num_chunks:,} chunks, "
        f"{totals.num_tokens:,} tokens"
    )
    click.echo(progress_text(progress))


@command.command("show")
@click.argument("reference", metavar="DOCUMENT")
@kb_option
@json_option
def show_command(reference: str, kb_folder: Path, as_json: bool) -> None:
    """Show the chunks of a document, named by id or file."""
    with KnowledgeBase.open(kb_folder) as kb:
        found = [(d, kb.catalogue.document_chunks(d.id)) for d in kb.find(reference)]
    if as_json:
        documents = [
            document._asdict()
            | {
                "chunks": [
                    {"id": c.id, "num_tokens": len(c.token_ids), "span": [s, e], "text": c.text}
                    for c, s, e in placed
                ]
            }
            for document, placed in found
        ]
        click.echo(json.dumps({"documents": documents}))
        return
    for document, placed in found:
        click.secho(f"{document.title}  ({document.source})", bold=True)
        for chunk, start, end in placed:
            num_tokens = len(chunk.token_ids)
            click.secho(f"\n── {chunk.id[:8]} · {num_tokens} tokens · {start}–{end}", dim=True)
            click.echo(chunk.text.rstrip())


@command.command("rm")
@click.argument("references", nargs=-1, required=True, metavar="DOCUMENT...")
@kb_option
@api_key_option
@json_option
@pass_config
def rm_command(
    references: tuple[str, ...],
    kb_folder: Path,
    qdrant_api_key: str | None,
    as_json: bool,
    effective: EffectiveConfig,
) -> None:
    """Remove documents, named by id or file, with the chunks that only they use."""
    with KnowledgeBase.open(kb_folder, api_key=qdrant_api_key) as kb:
        # All of them first: a typo stops us before anything is removed, and two names of one
        # document are one document.
        ids = {document.id for reference in references for document in kb.find(reference)}
        gone = len(ids)
        if (kb_folder / "kv").is_dir():
            from kvweave.app.library.kv_sync import (
                remove_with_kv,  # brings torch: only where there is KV
            )
            from kvweave.app.library.store_tiers import remote_tiers

            remotes = remote_tiers(effective.config.store)
            orphaned = remove_with_kv(kb, sorted(ids), remotes).orphaned
        else:
            orphaned = kb.remove_documents(sorted(ids)).orphaned
    if as_json:
        click.echo(json.dumps({"removed": gone, "orphaned_chunks": orphaned}))
    else:
        click.echo(f"removed {gone:,} documents and {len(orphaned):,} chunks")


@command.command("search")
@click.argument("query")
@kb_option
@click.option("-k", "k", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--mode", type=click.Choice(MODES), default="vector", show_default=True)
@api_key_option
@json_option
def search_command(
    query: str, kb_folder: Path, k: int, mode: Mode, qdrant_api_key: str | None, as_json: bool
) -> None:
    """Find the chunks nearest to a question."""
    with KnowledgeBase.open(kb_folder, api_key=qdrant_api_key) as listing:
        embedder = None if mode == "words" else find_embedder(listing.settings.embedder)
    with KnowledgeBase.open(kb_folder, embedder=embedder, api_key=qdrant_api_key) as kb:
        if embedder is not None:
            embedder.embed_query("")  # loads the model: not part of the search
        started = time.perf_counter()
        hits = kb.search(query, k, mode=mode)
        took_ms = (time.perf_counter() - started) * 1e3
    if as_json:
        rows = [
            {"chunk": h.chunk.id, "document": h.document, "score": h.score, "text": h.chunk.text}
            for h in hits
        ]
        click.echo(json.dumps({"query": query, "mode": mode, "took_ms": took_ms, "hits": rows}))
        return
    for place, hit in enumerate(hits, start=1):
        click.secho(f"\n{place}  {hit.score:.4f}  {hit.chunk.id[:8]}", bold=True)
        click.echo(hit.chunk.text.rstrip())
    click.secho(f"\n{len(hits)} chunks in {took_ms:.0f} ms ({mode})", dim=True)


def _table(*headings: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        right = heading in ("chunks", "tokens")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    return table


def _print(table: Any) -> None:
    from rich.console import Console

    Console().print(table)
