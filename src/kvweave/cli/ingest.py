"""`kvweave ingest`: files and folders into a knowledge base."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvweave.cli.ingest_display import SecondsFor, progress_bar, show
from kvweave.cli.knowledge_bases import find_embedder, find_tokenizer, with_model
from kvweave.cli.options import (
    Amount,
    api_key_option,
    config_option,
    config_options,
    json_option,
    kb_option,
    model_options,
    pass_config,
    store_options,
    url_option,
)
from kvweave.config import EffectiveConfig, WeaveConfig, known_keys
from kvweave.errors import ConfigError

if TYPE_CHECKING:
    from kvweave.app.library.kv_sync import KVSync
    from kvweave.app.library.runtime import ModelRuntime
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
    from kvweave.ingest.report import Skipped
    from kvweave.ingest.sources import Source

EXIT_SKIPPED = 1  # some files did not get in, or none did
# mean nothing without --kv
ABOUT_KV = (
    *("--encoding", "--refresh-neighbours"),
    *("--device", "--dtype", "--quant", "--system"),
)


@dataclass(frozen=True, slots=True)
class IngestArguments:
    """What was typed, besides what belongs to the configuration."""

    paths: tuple[Path, ...]
    urls: Path | None
    sitemap: str | None
    kb_folder: Path
    url: str | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    chunk_tokens: int | None
    index: str | None
    max_file_mb: float
    meta: tuple[str, ...]
    prune: bool
    kv: bool
    refresh_neighbours: bool
    qdrant_api_key: str | None
    as_json: bool


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--urls",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Pages of the web, one address a line.",
)
@click.option("--sitemap", metavar="URL", help="The pages that a sitemap names, of its own host.")
@kb_option
@url_option
@click.option("--include", multiple=True, metavar="GLOB", help="Only files that match. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="No files that match. Repeatable.")
@click.option("--chunk-tokens", type=int, help="Tokens per chunk at most.  [default: 256]")
@config_option("library.embedder")
@click.option("--index", help="auto, flat, ivf, hnsw or a Qdrant URL.  [default: auto]")
@click.option("--max-file-mb", type=Amount(0), default=64, show_default=True)
@click.option(
    "--meta",
    multiple=True,
    metavar="KEY=VALUE",
    help="Metadata of every document of this run, for --filter. Repeatable.",
)
@click.option("--prune", is_flag=True, help="Remove documents whose file is gone from PATHS.")
@click.option("--kv", is_flag=True, help="Compute and store chunk KV too, for ask --reuse.")
@config_options("library.encoding", "model.system")
@click.option(
    "--refresh-neighbours",
    is_flag=True,
    help="Compute KV behind neighbours again where others are nearer by now.",
)
@model_options
@store_options
@api_key_option
@json_option
@pass_config
@click.pass_context
def command(ctx: click.Context, /, effective: EffectiveConfig, **arguments: Any) -> None:
    """Bring files and folders into a knowledge base. Run it again: only changes are done.

    Reads txt, md, rst, html, pdf, epub, docx, pptx, xlsx, csv, tsv, json, jsonl, yaml and source
    code. A file that cannot be read is reported and skipped; the exit code is then 1.
    """
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.corpus.metadata import parse_pairs
    from kvweave.corpus.parsers import ParseLimits
    from kvweave.corpus.settings import read_settings
    from kvweave.ingest.pipeline import ingest
    from kvweave.ingest.sources import IngestOptions, Selection

    config, asked = effective.config, IngestArguments(**arguments)
    pages = _addresses(asked)
    if asked.url is not None:
        if not _upload(asked, pages):
            ctx.exit(EXIT_SKIPPED)
        return
    _check_preparation(effective, asked)
    _check_store(config, asked)
    stored, embedder = read_settings(asked.kb_folder), config.library.embedder
    if stored is not None and "library.embedder" not in effective.flags:
        embedder = stored.embedder
    options = IngestOptions(
        selection=Selection(asked.include, asked.exclude),
        limits=ParseLimits(
            file_bytes=int(asked.max_file_mb * 2**20),
            seconds=config.library.parse_s,
            memory_bytes=config.library.parse_bytes,
        ),
        prune=asked.prune,
        metadata=parse_pairs(asked.meta, "--meta"),
    )
    config = with_model(config)
    with KnowledgeBase.open(
        asked.kb_folder,
        tokenizer=find_tokenizer(config.model.model),
        embedder=find_embedder(embedder, config.library.embedder_weights),
        chunk_tokens=asked.chunk_tokens,
        index=asked.index,
        create=True,
        api_key=asked.qdrant_api_key,
    ) as kb:
        try:
            with (
                _encoding(kb, config, asked) as (encoder, sync, seconds_for),
                progress_bar(seconds_for) as progress,
            ):
                sources, missed = _sources(asked, pages, options.limits.file_bytes)
                report = ingest(
                    kb, sources, encoder, progress=progress, options=options, kv_sync=sync
                )
                report = replace(report, skipped=(*missed, *report.skipped))
                saves = None if encoder is None else encoder.saves()
        except KeyboardInterrupt:
            num_documents = kb.totals().num_documents
            click.echo(
                f"stopped; {num_documents:,} documents are in, run the same command to go on",
                err=True,
            )
            raise
        show(kb, report, saves, asked.as_json)
    if report.skipped or report.is_in_vain:
        ctx.exit(EXIT_SKIPPED)


def _addresses(asked: IngestArguments) -> list[str]:
    """The pages of the web that were asked for. Raises ConfigError where nothing at all was."""
    from kvweave.cli.web_pages import read_addresses, read_sitemap

    if not (asked.paths or asked.urls or asked.sitemap):
        raise ConfigError("nothing to ingest; name PATHS, --urls FILE or --sitemap URL")
    listed = [] if asked.urls is None else read_addresses(asked.urls)
    return listed + ([] if asked.sitemap is None else read_sitemap(asked.sitemap))


def _sources(
    asked: IngestArguments, pages: list[str], most_bytes: int
) -> "tuple[Iterable[Source], list[Skipped]]":
    """What is to be taken in; pages are fetched as their turn comes, and those that cannot be are
    added to the list."""
    from kvweave.cli.web_pages import fetch_pages
    from kvweave.ingest.report import Skipped

    missed: list[Skipped] = []
    if not pages:
        return asked.paths, missed

    def find() -> "Iterator[Source]":
        yield from asked.paths
        for page in fetch_pages(pages, most_bytes):
            if isinstance(page, Skipped):
                missed.append(page)
            else:
                yield page

    return find(), missed


def _upload(asked: IngestArguments, pages: list[str]) -> bool:
    """Let a running server take them in. False: some files did not get in."""
    from kvweave.cli import remote
    from kvweave.clients.server import ServerClient
    from kvweave.corpus.metadata import parse_pairs
    from kvweave.ingest.sources import Selection

    if asked.prune or asked.refresh_neighbours or asked.chunk_tokens or asked.index:
        raise ConfigError(
            "--prune, --refresh-neighbours, --chunk-tokens and --index are for a folder; leave "
            "them out with --url"
        )
    client, kb = ServerClient(asked.url or ""), str(asked.kb_folder)
    counts = remote.upload(
        client,
        kb,
        asked.paths,
        Selection(asked.include, asked.exclude),
        parse_pairs(asked.meta, "--meta"),
        pages=pages,
        wait_for_kv=asked.kv,
    )
    counts.show(kb, client.url, as_json=asked.as_json)
    return not counts.skipped


def _check_preparation(effective: EffectiveConfig, asked: IngestArguments) -> None:
    """Judge how chunk KV is to be made before a knowledge base is. Raises ConfigError."""
    library = effective.config.library
    if asked.kv and library.encoding is not None:
        from kvweave.fuse.encode.preparation import Preparation

        Preparation.parse(library.encoding)
    elif not asked.kv:
        typed = {
            effective.sources[key]
            for key in effective.flags
            if effective.config.value(key) != known_keys()[key].default
        }
        typed |= {"--refresh-neighbours"} if asked.refresh_neighbours else set()
        vain = [option for option in ABOUT_KV if option in typed]
        if vain:
            does = "is" if len(vain) == 1 else "are"
            raise ConfigError(f"{', '.join(vain)} {does} for computing chunk KV; add --kv")


def _check_store(config: WeaveConfig, asked: IngestArguments) -> None:
    """Judge where chunk KV is to be kept before any is computed. Raises ConfigError."""
    if not asked.kv:
        return
    from kvweave.app.library.store_tiers import check_store, remote_tiers

    check_store(config.store)
    if config.store.disk_bytes == 0 and not remote_tiers(config.store):
        raise ConfigError(
            "store.disk_bytes is 0 and no tier is shared: nothing of --kv would be kept; "
            "set store.redis_url or store.s3_url, or leave disk_bytes out"
        )


@contextmanager
def _encoding(
    kb: "KnowledgeBase", config: WeaveConfig, asked: IngestArguments
) -> "Iterator[tuple[ChunkEncoder | None, KVSync | None, SecondsFor]]":
    """What computes chunk KV, what keeps the KV that is there in step with the documents, and how
    long computing takes.

    Loading the model takes a moment, so only if it is wanted.
    """
    if not asked.kv and not (kb.folder / "kv").is_dir():
        yield None, None, _not_known
        return
    from kvweave.app.library.kv_sync import SyncJob, sync_without_model

    if not asked.kv:
        from kvweave.app.library.store_tiers import remote_tiers

        with sync_without_model(kb, remote_tiers(config.store)) as sync:
            yield None, sync, _not_known
        return
    from kvweave.app.library.library_kv import KVOptions, LibraryKV
    from kvweave.app.library.runtime import ModelRuntime

    runtime = ModelRuntime.open(config.model)
    options = KVOptions.from_config(config)
    with LibraryKV.open(kb, runtime.decoder, runtime.tokenizer, options, say=_say) as kv:
        sync = kv.sync(SyncJob(encodes=True, refresh=asked.refresh_neighbours))  # may refuse
        kv.prepare_to_encode()
        yield kv.encoder, sync, _seconds_for(runtime, kv.encoder)
    _measure(runtime, options.codec)


def _measure(runtime: "ModelRuntime", codec: str) -> None:
    """Measure this machine, unless it was: the first question need not wait for it, nor do without
    the chunk KV that is there now."""
    from kvweave.app.auto.machine_profile import find_machine, new_machine

    if find_machine(runtime.decoder, codec) is None:
        new_machine(runtime.decoder, codec)


def _seconds_for(runtime: "ModelRuntime", encoder: "ChunkEncoder") -> SecondsFor:
    """How long so many tokens take to encode, as far as this machine was measured."""

    def seconds(num_tokens: int) -> float | None:
        from kvweave.app.auto.machine_profile import find_machine
        from kvweave.fuse.encode.chunk_encoder import CPU_PASS_ROWS

        machine = find_machine(runtime.decoder, encoder.context.codec)
        if machine is None:
            return None
        behind = len(encoder.preamble_ids) + len(encoder.texts.filler)
        return machine.prefill_s(behind, CPU_PASS_ROWS) * num_tokens / CPU_PASS_ROWS

    return seconds


def _not_known(_: int) -> None:
    """Nothing is encoded."""


def _say(line: str) -> None:
    click.echo(line, err=True)
