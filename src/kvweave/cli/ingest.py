"""`kvweave ingest`: files and folders into a knowledge base."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvweave.cli.ingest_view import progress_bar, show
from kvweave.cli.knowledge_bases import (
    api_key_option,
    find_embedder,
    find_tokenizer,
    json_option,
    kb_option,
)
from kvweave.cli.loading import model_options
from kvweave.cli.numbers import Amount
from kvweave.errors import ConfigError

if TYPE_CHECKING:
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
    from kvweave.ingest.encoder import ChunkKVSync

EXIT_SKIPPED = 1  # it went through, but some files did not get in


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@kb_option
@click.option("--include", multiple=True, metavar="GLOB", help="Only files that match. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="No files that match. Repeatable.")
@click.option("--chunk-tokens", type=int, help="Tokens per chunk at most.  [default: 256]")
@click.option("--embedder", help="Folder, embedded model or hub id.  [default: minilm]")
@click.option("--index", help="auto, flat, ivf, hnsw or a Qdrant URL.  [default: auto]")
@click.option("--max-file-mb", type=Amount(0), default=64, show_default=True)
@click.option("--prune", is_flag=True, help="Remove documents whose file is gone from PATHS.")
@click.option("--kv", is_flag=True, help="Compute and store chunk KV too, for ask --reuse.")
@click.option(
    "--encoding", help="isolated, filler:PASSAGES or neighbours:COUNT.  [default: filler]"
)
@click.option(
    "--extras", multiple=True, metavar="NAME", help="inter, anchors:RULE or none. Repeatable."
)
@click.option(
    "--refresh-neighbours",
    is_flag=True,
    help="Compute KV behind neighbours again where others are nearer by now.",
)
@model_options
@api_key_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    paths: tuple[Path, ...],
    kb_folder: Path,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    chunk_tokens: int | None,
    embedder: str | None,
    index: str | None,
    max_file_mb: float,
    prune: bool,
    kv: bool,
    encoding: str | None,
    extras: tuple[str, ...],
    refresh_neighbours: bool,
    model: str,
    device: str,
    dtype: str,
    quant: str,
    qdrant_api_key: str | None,
    as_json: bool,
) -> None:
    """Bring files and folders into a knowledge base. Run it again: only changes are done.

    Reads txt, md, html, pdf, csv, tsv, jsonl and docx. A file that cannot be read is reported and
    skipped; the exit code is then 1.
    """
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.corpus.parsers import ParseLimits
    from kvweave.corpus.settings import read_settings
    from kvweave.ingest.pipeline import IngestOptions, ingest
    from kvweave.ingest.sources import Selection

    if not kv:
        about_kv = {
            "--encoding": encoding is not None,
            "--extras": bool(extras),
            "--refresh-neighbours": refresh_neighbours,
            "--device": device != "auto",
            "--dtype": dtype != "auto",
            "--quant": quant != "none",
        }
        _refuse_without_kv([option for option, is_given in about_kv.items() if is_given])
    elif encoding is not None or extras:
        from kvweave.fuse.encode.preparation import DEFAULT_ENCODING, Preparation

        # judged before a knowledge base is made
        Preparation.parse(DEFAULT_ENCODING if encoding is None else encoding, _extras(extras) or ())
    machine = {"device": device, "dtype": dtype, "quant": quant}
    stored = read_settings(kb_folder)
    options = IngestOptions(
        selection=Selection(include, exclude),
        limits=ParseLimits(file_bytes=int(max_file_mb * 2**20)),
        prune=prune,
    )
    with KnowledgeBase.open(
        kb_folder,
        tokenizer=find_tokenizer(model),
        embedder=find_embedder(embedder or (stored.embedder if stored else "minilm")),
        chunk_tokens=chunk_tokens,
        index=index,
        create=True,
        api_key=qdrant_api_key,
    ) as kb:
        try:
            with (
                _encoding(
                    kb, model, kv, encoding, _extras(extras), refresh_neighbours, machine
                ) as (encoder, upkeep),
                progress_bar() as progress,
            ):
                report = ingest(
                    kb, paths, encoder, progress=progress, options=options, kv_sync=upkeep
                )
                saves = None if encoder is None else encoder.saves()
        except KeyboardInterrupt:
            num_documents = kb.totals().num_documents
            click.echo(
                f"stopped; {num_documents:,} documents are in, run the same command to go on",
                err=True,
            )
            raise
        show(kb, report, saves, as_json)
    if report.skipped:
        ctx.exit(EXIT_SKIPPED)


def _encoding(
    kb: "KnowledgeBase",
    model: str,
    wanted: bool,
    encoding: str | None,
    extras: tuple[str, ...] | None,
    refresh: bool,
    machine: dict[str, str],
) -> "AbstractContextManager[tuple[ChunkEncoder | None, ChunkKVSync | None]]":
    """Whoever computes chunk KV and whoever keeps what is there in step with the documents.

    Loading the model takes a moment, so only if it is wanted.
    """
    if not wanted and not (kb.folder / "kv").is_dir():
        return nullcontext((None, None))
    from kvweave.app.library.encoder_setup import chunk_encoder, upkeep_without_model

    if not wanted:
        return upkeep_without_model(kb)
    return chunk_encoder(
        kb,
        model,
        encoding,
        extras,
        refresh=refresh,
        say=lambda line: click.echo(line, err=True),
        **machine,
    )


def _refuse_without_kv(options: list[str]) -> None:
    if options:
        does = "is" if len(options) == 1 else "are"
        raise ConfigError(f"{', '.join(options)} {does} for computing chunk KV; add --kv")


def _extras(given: tuple[str, ...]) -> tuple[str, ...] | None:
    """None leaves the stored ones; the word none does without."""
    if not given:
        return None
    return () if given == ("none",) else given
