"""`kvweave kb`: check, back up, restore, change and remove whole knowledge bases."""

import json
from pathlib import Path

import click

from kvweave.cli.knowledge_bases import check_knowledge_base
from kvweave.cli.options import json_option, kb_option, pass_config
from kvweave.config import EffectiveConfig


@click.group()
def command() -> None:
    """Check, back up, restore, change and remove knowledge bases."""


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

    check_knowledge_base(kb_folder)
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


@command.command("rm")
@kb_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_config
def rm_command(kb_folder: Path, yes: bool, effective: EffectiveConfig) -> None:
    """Remove a knowledge base with its chunk KV, also what lies in remote tiers."""
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
