"""`kvweave docs`: look at, search and remove what a knowledge base holds."""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import click

from kvweave.cli.knowledge_bases import find_embedder
from kvweave.cli.options import (
    api_key_option,
    json_option,
    kb_option,
    pass_config,
    question_options,
    url_option,
)
from kvweave.cli.remote import find_document
from kvweave.cli.tables import make_table, progress_text, size_text, table_console
from kvweave.clients.server import Reply, ServerClient
from kvweave.config import EffectiveConfig
from kvweave.corpus.catalogue import DocumentInfo, Totals
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.metadata import MetadataFilter
from kvweave.corpus.search import SearchOptions
from kvweave.errors import RequestError
from kvweave.types import DocumentId


class SearchArguments(NamedTuple):
    """What was typed for a search, besides what belongs to the configuration."""

    query: str
    kb_folder: Path
    url: str | None
    k: int
    filter: dict[str, Any]
    qdrant_api_key: str | None
    as_json: bool


@click.group()
def command() -> None:
    """List, show, search and remove documents."""


@command.command("ls")
@kb_option
@url_option
@json_option
def ls_command(kb_folder: Path, url: str | None, as_json: bool) -> None:
    """List the documents."""
    if url is not None:
        documents = [_from_server(each) for each in ServerClient(url).documents(str(kb_folder))]
        chunks, tokens = (
            sum(getattr(d, n) for d in documents) for n in ("num_chunks", "num_tokens")
        )
        totals = Totals(len(documents), chunks, tokens)
    else:
        with KnowledgeBase.open(kb_folder) as kb:
            documents, totals = kb.documents(), kb.totals()
    if as_json:
        rows = [document._asdict() for document in documents]
        click.echo(json.dumps({"documents": rows, "totals": totals._asdict()}))
        return
    listed = [
        (
            document.id[:8],
            document.title,
            f"{document.num_chunks:,}",
            f"{document.num_tokens:,}",
            time.strftime("%Y-%m-%d", time.localtime(document.added_at)),
            document.source,
        )
        for document in documents
    ]
    table = make_table(
        ("id", "title", "chunks", "tokens", "added", "source"),
        listed,
        right=("chunks", "tokens"),
        names=("title",),
        paths=("source",),
    )
    table_console().print(table)
    click.echo(f"{totals.num_documents:,} documents, {totals.num_chunks:,} chunks")


@command.command("status")
@kb_option
@url_option
@json_option
def status_command(kb_folder: Path, url: str | None, as_json: bool) -> None:
    """What is in it, and how far its chunk KV is."""
    if url is not None:
        show_server_kb(ServerClient(url).kb(str(kb_folder)), as_json)
        return
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
@url_option
@json_option
def show_command(reference: str, kb_folder: Path, url: str | None, as_json: bool) -> None:
    """Show the chunks of a document, named by id or file."""
    if url is not None:
        _show_on_server(ServerClient(url), str(kb_folder), reference, as_json)
        return
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
@url_option
@api_key_option
@json_option
@pass_config
def rm_command(
    references: tuple[str, ...],
    kb_folder: Path,
    url: str | None,
    qdrant_api_key: str | None,
    as_json: bool,
    effective: EffectiveConfig,
) -> None:
    """Remove documents, named by id or file, with the chunks that only they use."""
    if url is not None:
        client, name = ServerClient(url), str(kb_folder)
        named = {find_document(client, name, reference)["id"] for reference in references}
        num_chunks = sum(client.delete_document(name, each)["chunks"] for each in sorted(named))
        if as_json:
            click.echo(json.dumps({"removed": len(named), "chunks": num_chunks}))
        else:
            click.echo(f"removed {len(named):,} documents and {num_chunks:,} chunks")
        return
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
@url_option
@click.option("-k", "k", type=click.IntRange(min=1), default=5, show_default=True)
@question_options("retrieval", "min_score", "reranker", "filter")
@api_key_option
@json_option
@pass_config
def search_command(effective: EffectiveConfig, **arguments: Any) -> None:
    """Find the chunks nearest to a question."""
    asked, library = SearchArguments(**arguments), effective.config.library
    query, k, kb_folder = asked.query, asked.k, asked.kb_folder
    url, as_json, qdrant_api_key = asked.url, asked.as_json, asked.qdrant_api_key
    among = MetadataFilter.parse(asked.filter)
    if url is not None:
        typed = {key.partition(".")[2]: effective.config.value(key) for key in effective.flags}
        if typed.pop("reranker", None) is not None:
            raise RequestError("--reranker is the server's own setting; leave it out with --url")
        fields = {**typed, "filter": asked.filter}
        _show_hits(ServerClient(url).search(str(kb_folder), query, k, **fields), as_json)
        return
    how = SearchOptions(library.retrieval, library.min_score, among, library.reranker)
    with KnowledgeBase.open(kb_folder, api_key=qdrant_api_key) as listing:
        is_by_words = how.retrieval == "words"
        name, weights = listing.settings.embedder, library.embedder_weights
        embedder = None if is_by_words else find_embedder(name, weights)
    with KnowledgeBase.open(kb_folder, embedder=embedder, api_key=qdrant_api_key) as kb:
        if embedder is not None:
            embedder.embed_query("")  # loads the model: not part of the search
        started = time.perf_counter()
        hits = kb.search(query, k, how)
        took_ms = (time.perf_counter() - started) * 1e3
    if as_json:
        rows = [
            {"chunk": h.chunk.id, "document": h.document, "score": h.score, "text": h.chunk.text}
            for h in hits
        ]
        told = {"query": query, "retrieval": how.retrieval, "took_ms": took_ms, "hits": rows}
        click.echo(json.dumps(told))
        return
    for place, hit in enumerate(hits, start=1):
        click.secho(f"\n{place}  {hit.score:.4f}  {hit.chunk.id[:8]}", bold=True)
        click.echo(hit.chunk.text.rstrip())
    click.secho(f"\n{len(hits)} chunks in {took_ms:.0f} ms ({how.retrieval})", dim=True)


def show_server_kb(found: Reply, as_json: bool) -> None:
    """A knowledge base of a server."""
    if as_json:
        click.echo(json.dumps(found))
        return
    kv = found["kv"]
    click.echo(
        f"{found['documents']:,} documents, {found['chunks']:,} chunks, {found['tokens']:,} tokens"
    )
    in_front = kv.get("chunks_in_front", 0)  # an older server does not say
    fronts = f", {in_front:,} also for the first place in a prompt" if in_front else ""
    size = f", {size_text(kv['bytes'])}" if kv["bytes"] else ""
    done = f"KV {kv['chunks_done']:,} of {kv['chunks_total']:,} chunks"
    click.echo(f"{done}: {kv['state']}{size}{fronts}")
    if found["problem"] is not None:
        click.echo(f"it cannot be used: {found['problem']}", err=True)


def _from_server(found: Reply) -> DocumentInfo:
    return DocumentInfo(
        DocumentId(found["id"]),
        found["source"],
        found["title"],
        found["chars"],
        found["chunks"],
        found["tokens"],
        found["added_at"],
        found["metadata"],
    )


def _show_on_server(client: ServerClient, kb: str, reference: str, as_json: bool) -> None:
    document = client.document(kb, find_document(client, kb, reference)["id"])
    chunks = [client.chunk(kb, piece["id"]) for piece in document["pieces"]]
    if as_json:
        told = {key: value for key, value in document.items() if key != "pieces"}
        click.echo(json.dumps({"documents": [{**told, "chunks": chunks}]}))
        return
    click.secho(f"{document['title']}  ({document['source']})", bold=True)
    for chunk in chunks:
        click.secho(f"\n── {chunk['id'][:8]} · {chunk['tokens']} tokens", dim=True)
        click.echo(chunk["text"].rstrip())


def _show_hits(hits: list[Reply], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"hits": hits}))
        return
    for place, hit in enumerate(hits, start=1):
        click.secho(f"\n{place}  {hit['score']:.4f}  {hit['id'][:8]}", bold=True)
        click.echo(hit["text"].rstrip())
    click.secho(f"\n{len(hits)} chunks", dim=True)
