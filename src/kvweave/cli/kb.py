"""`kvweave kb`: list, count, check, back up, restore, change and remove whole knowledge bases."""

import json
from pathlib import Path
from typing import Any

import click

from kvweave.cli.knowledge_bases import check_knowledge_base
from kvweave.cli.options import config_option, json_option, kb_option, pass_config, url_option
from kvweave.cli.tables import progress_text, size_text
from kvweave.config import EffectiveConfig
from kvweave.errors import CorpusError
from kvweave.paths import kb_root


@click.group()
def command() -> None:
    """List, count, check, back up, restore, change and remove knowledge bases."""


@command.command("ls")
@config_option("server.kb_root")
@url_option
@json_option
@pass_config
def ls_command(url: str | None, as_json: bool, effective: EffectiveConfig) -> None:
    """List the knowledge bases of a folder, or of a server."""
    if url is not None:
        from kvweave.clients.server import ServerClient

        found = ServerClient(url).kbs()
        rows = [{name: each[name] for name in COLUMNS} for each in found]
    else:
        rows = _local_rows(effective.config.server.kb_root or kb_root())
    if as_json:
        click.echo(json.dumps({"kbs": rows}))
        return
    from kvweave.cli.tables import make_table, table_console

    cells = [[_cell(row[name]) for name in COLUMNS] for row in rows]
    table = make_table(
        COLUMNS, cells, right=("documents", "chunks", "tokens"), names=("name",), prose=("problem",)
    )
    table_console().print(table)
    click.echo(f"{len(rows):,} knowledge bases")


@command.command("stat")
@kb_option
@url_option
@json_option
def stat_command(kb_folder: Path, url: str | None, as_json: bool) -> None:
    """What a knowledge base holds, what it was made with and what it takes on the disk."""
    if url is not None:
        from kvweave.cli.docs import show_server_kb
        from kvweave.clients.server import ServerClient

        show_server_kb(ServerClient(url).kb(str(kb_folder)), as_json)
        return
    from kvweave.app.library.kv_progress import progress_on_disk
    from kvweave.corpus.knowledge_base import KnowledgeBase

    check_knowledge_base(kb_folder)
    with KnowledgeBase.open(kb_folder) as kb:
        totals, progress, settings = kb.totals(), progress_on_disk(kb), kb.settings
    files = (*kb_folder.glob("catalogue.sqlite*"), *(kb_folder / "index").glob("*"))
    told = {
        "kb": str(kb_folder),
        **totals._asdict(),
        "embedder": settings.embedder,
        "chunk_tokens": settings.chunk_tokens,
        "index": settings.index,
        "document_bytes": sum(file.stat().st_size for file in files if file.is_file()),
        "kv": progress._asdict(),
    }
    if as_json:
        click.echo(json.dumps(told))
        return
    click.echo(
        f"{totals.num_documents:,} documents, {totals.num_chunks:,} chunks of at most "
        f"{settings.chunk_tokens} tokens, {totals.num_tokens:,} tokens"
    )
    click.echo(f"embedder {settings.embedder}, index {settings.index}")
    click.echo(f"{size_text(told['document_bytes'])} of documents and vectors")
    click.echo(progress_text(progress))


COLUMNS = ("name", "documents", "chunks", "tokens", "problem")


def _local_rows(root: Path) -> list[dict[str, Any]]:
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.corpus.settings import FILE

    rows: list[dict[str, Any]] = []
    for folder in sorted(root.glob("*")) if root.is_dir() else ():
        if not (folder / FILE).is_file():
            continue
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row["name"] = folder.name
        try:
            with KnowledgeBase.open(folder) as kb:
                row |= dict(zip(("documents", "chunks", "tokens"), kb.totals(), strict=True))
        except CorpusError as error:  # the others are listed all the same
            row["problem"] = str(error)
        rows.append(row)
    return rows


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


@command.command("check")
@kb_option
@json_option
@click.pass_context
def check_command(ctx: click.Context, kb_folder: Path, as_json: bool) -> None:
    """Read all of it and say what does not fit. The exit code is 1 if something does not.

    Chunk KV checks itself whenever it is read: damaged KV is computed again.
    """
    from kvweave.corpus.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(kb_folder) as kb:
        problems, totals = kb.check(), kb.totals()
    if as_json:
        click.echo(json.dumps({"problems": problems, "totals": totals._asdict()}))
    else:
        for problem in problems:
            click.echo(problem)
        verdict = f"{len(problems)} problems" if problems else "sound"
        click.echo(f"{verdict}: {totals.num_documents:,} documents, {totals.num_chunks:,} chunks")
    if problems:
        ctx.exit(1)


@command.command("backup")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@kb_option
@json_option
def backup_command(file: Path, kb_folder: Path, as_json: bool) -> None:
    """Write a knowledge base to FILE: documents and vectors, as of one moment. Index and chunk KV
    are made again where it is restored. A server may go on using it."""
    from kvweave.corpus.backup import backup
    from kvweave.corpus.disk_files import disk_trouble

    check_knowledge_base(kb_folder)
    with disk_trouble(f"cannot write {file}"):
        done = backup(kb_folder, file)
    if as_json:
        click.echo(json.dumps({"file": str(file), **done._asdict()}))
        return
    click.echo(
        f"{done.num_documents:,} documents, {done.num_chunks:,} chunks, "
        f"{done.num_bytes / 2**20:,.1f} MiB in {file}"
    )


@command.command("restore")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@kb_option
@json_option
def restore_command(file: Path, kb_folder: Path, as_json: bool) -> None:
    """Make a knowledge base of a backup, in a new folder, after all of it was checked."""
    from kvweave.corpus.backup import restore

    done = restore(file, kb_folder)
    if as_json:
        click.echo(json.dumps({"folder": str(kb_folder), **done._asdict()}))
        return
    click.echo(f"{done.num_documents:,} documents, {done.num_chunks:,} chunks in {kb_folder}")
    if done.left_index is not None:
        click.echo(
            f"its index was at {done.left_index!r} and is local now; to use a server again: "
            f"kvweave ingest PATH --kb {kb_folder} --index URL",
            err=True,
        )


@command.command("set")
@kb_option
@click.option(
    "--order",
    required=True,
    type=click.Choice(["as_found", "free", "auto", "configured"]),
    help="Whether chunks may move, for questions that do not say it; configured: as anywhere else.",
)
def set_command(kb_folder: Path, order: str) -> None:
    """Change what is usual for the questions to a knowledge base. A server that has it open sees it
    when it opens it again; over HTTP: PATCH /v1/kb/NAME."""
    from kvweave.corpus.knowledge_base import KnowledgeBase

    check_knowledge_base(kb_folder)
    with KnowledgeBase.open(kb_folder) as kb:
        kb.set_order(None if order == "configured" else order)
    click.echo(f"{kb_folder}: order {order}")


@command.command("prepare")
@kb_option
@url_option
@json_option
def prepare_command(kb_folder: Path, url: str | None, as_json: bool) -> None:
    """Have a server make the chunk KV that a knowledge base lacks now, beside answers, until
    nothing is left. Without a server: kvweave ingest --kv."""
    from kvweave.cli.docs import show_server_kb
    from kvweave.clients.server import ServerClient

    if url is None:
        raise click.UsageError("--url is missing; without a server: kvweave ingest --kv")
    show_server_kb(ServerClient(url).prepare_kb(str(kb_folder)), as_json)


@command.command("rm")
@kb_option
@url_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_config
def rm_command(kb_folder: Path, url: str | None, yes: bool, effective: EffectiveConfig) -> None:
    """Remove a knowledge base with its chunk KV, also what lies in remote tiers."""
    if url is not None:
        from kvweave.clients.server import ServerClient

        client, name = ServerClient(url), str(kb_folder)
        num_documents = client.kb(name)["documents"]
        if not yes:
            words = f"Remove {name!r} at {client.url} with {num_documents:,} documents?"
            click.confirm(words, abort=True)
        client.delete_kb(name)
        click.echo(f"removed {name!r} and {num_documents:,} documents")
        return
    from kvweave.corpus.kb_folder import remove_folder
    from kvweave.corpus.knowledge_base import KnowledgeBase

    check_knowledge_base(kb_folder)
    with KnowledgeBase.open(kb_folder) as kb:
        documents = kb.documents()
        if not yes:
            click.confirm(f"Remove {kb_folder} with {len(documents):,} documents?", abort=True)
        if (kb_folder / "kv").is_dir():  # else the imports, which bring torch, are for nothing
            from kvweave.app.library.kv_sync import remove_with_kv
            from kvweave.app.library.store_tiers import remote_tiers

            remove_with_kv(kb, [d.id for d in documents], remote_tiers(effective.config.store))
    remove_folder(kb_folder)
    click.echo(f"removed {kb_folder} and {len(documents):,} documents")
