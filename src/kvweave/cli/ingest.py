"""`kvweave ingest`: files and folders into a knowledge base."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvweave.cli.amounts import progress_text, size_text, time_text
from kvweave.cli.knowledge_bases import find_embedder, find_tokenizer
from kvweave.cli.options import (
    Amount,
    api_key_option,
    config_option,
    json_option,
    kb_option,
    model_options,
    pass_config,
    store_options,
    system_option,
    url_option,
)
from kvweave.cli.pulling import with_model
from kvweave.config import EffectiveConfig, WeaveConfig, known_keys
from kvweave.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from kvweave.app.library.kv_sync import KVSync
    from kvweave.app.runtime import ModelRuntime
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
    from kvweave.fuse.encode.save_log import Saves
    from kvweave.ingest.report import IngestProgress, IngestReport, OnProgress, Skipped
    from kvweave.ingest.sources import Source

SecondsFor = Callable[[int], float | None]  # tokens to encode; None: not known
EXIT_SKIPPED = 1  # it went through, but some files did not get in
MAX_LISTED = 20  # of skipped files, for people
# mean nothing without --kv
ABOUT_KV = (
    *("--encoding", "--extras", "--refresh-neighbours"),
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


def _extras(names: tuple[str, ...]) -> tuple[str, ...]:
    """The word none does without."""
    return () if names == ("none",) else names


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
@config_option(
    "library.embedder",
    "--embedder",
    help="Folder, embedded model or hub id.  [default: minilm]",
)
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
@config_option(
    "library.encoding",
    "--encoding",
    help="isolated, filler:PASSAGES or neighbours:COUNT.  [default: filler]",
)
@config_option(
    "library.extras",
    "--extras",
    to_key=_extras,
    multiple=True,
    metavar="NAME",
    help="inter, anchors:RULE or none. Repeatable.",
)
@system_option
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
    from kvweave.ingest.pipeline import IngestOptions, ingest
    from kvweave.ingest.sources import Selection

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
        embedder=find_embedder(embedder),
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
    if report.skipped:
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

    def found() -> "Iterator[Source]":
        yield from asked.paths
        for page in fetch_pages(pages, most_bytes):
            if isinstance(page, Skipped):
                missed.append(page)
            else:
                yield page

    return found(), missed


def _upload(asked: IngestArguments, pages: list[str]) -> bool:
    """The same by a running server. False: some files did not get in."""
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
    if asked.kv and (library.encoding is not None or library.extras is not None):
        from kvweave.fuse.encode.preparation import DEFAULT_ENCODING, Preparation

        encoding = DEFAULT_ENCODING if library.encoding is None else library.encoding
        Preparation.parse(encoding, library.extras or ())
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
    from kvweave.app.runtime import ModelRuntime

    runtime = ModelRuntime.open(config.model)
    options = KVOptions.of(config)
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


def _unsaved_line(saves: "Saves | None") -> str | None:
    """One line on chunk KV that was computed and could not be kept; None if all was."""
    if saves is None or not saves.dropped:
        return None
    why = f" ({', '.join(saves.reasons)})" if saves.reasons else ""
    return (
        f"{saves.dropped:,} of {saves.saved + saves.dropped:,} chunk KV could not be saved{why}; "
        "questions compute it, run the same command to try again"
    )


def show(kb: "KnowledgeBase", report: "IngestReport", saves: "Saves | None", as_json: bool) -> None:
    """The outcome: words for people, or one JSON object."""
    totals = kb.totals()
    unsaved = _unsaved_line(saves)
    if unsaved is not None:
        click.echo(unsaved, err=True)
    if as_json:
        outcome = asdict(report) | {"skipped": [s._asdict() for s in report.skipped]}
        told = {"chunk_kv": None if saves is None else saves._asdict(), "totals": totals._asdict()}
        click.echo(json.dumps({"kb": str(kb.folder), **outcome, **told}))
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{report.added:,}[/] added, {report.updated:,} updated, {report.unchanged:,} "
        f"unchanged, {report.removed:,} removed in {report.elapsed_s:.1f} s"
    )
    console.print(
        f"{report.new_chunks:,} new chunks, {report.shared_chunks:,} shared; "
        f"{escape(str(kb.folder))} now holds {totals.num_documents:,} documents, "
        f"{totals.num_chunks:,} chunks, {totals.num_tokens:,} tokens"
    )
    console.print(_kv_line(kb, has_kv=saves is not None))
    if report.ignored_files:
        console.print(f"[dim]{report.ignored_files:,} files of other kinds left alone[/]")
    complaints = Console(stderr=True, highlight=False, soft_wrap=True)
    for source, reason in report.skipped[:MAX_LISTED]:
        complaints.print(f"[yellow]skipped[/] {escape(source)}: {escape(reason)}")
    if len(report.skipped) > MAX_LISTED:
        complaints.print(f"… and {len(report.skipped) - MAX_LISTED} more; --json lists all")


def _kv_line(kb: "KnowledgeBase", *, has_kv: bool) -> str:
    """What chunk KV there is now, and how the rest is made."""
    from kvweave.app.library.kv_progress import progress_on_disk

    done = progress_on_disk(kb)
    if has_kv:
        return f"{done.chunks_done:,} chunks, {size_text(done.num_bytes)} of chunk KV"
    if done.state == "ready":
        return progress_text(done)
    return (
        f"{progress_text(done)}: a server makes the rest in the background where answers would "
        "use it; to make it now, run this with --kv"
    )


@contextmanager
def progress_bar(
    seconds_for: SecondsFor,
) -> "Iterator[OnProgress]":
    """What is done and what is left, a bar for each phase, on a terminal; in a pipe no more than
    how much chunk KV there will be. `seconds_for` so many tokens, before any was encoded."""
    if not sys.stderr.isatty():

        def announce(state: "IngestProgress") -> None:
            if (words := announcement(state, seconds_for)) is not None:
                click.echo(words, err=True)

        yield announce
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}  # by title: a bar of its own for each

        def move(state: "IngestProgress") -> None:
            if (words := announcement(state, seconds_for)) is not None:
                bar.console.print(words, highlight=False)
            title, done, total = measure_of(state)
            if title not in tasks:
                for task in tasks.values():
                    bar.update(task, total=1, completed=1)
                tasks[title] = bar.add_task(title, words="")
            task = tasks[title]
            elapsed_s = bar.tasks[bar.task_ids.index(task)].elapsed or 0.0
            bar.update(task, total=total, completed=done, words=bar_words(state, elapsed_s))

        yield move


def measure_of(state: "IngestProgress") -> tuple[str, int, int | None]:
    """The title of a phase's bar, how much of it is done, and of how much; None: not known."""
    match state.phase:
        case "encode":
            return "KV", state.num_chunks, state.total_chunks
        case "neighbours":
            return "neighbours", state.num_chunks, state.total_chunks
        case "index":
            return "index", 0, None
        case "read" | "embed":
            return "text", state.done_bytes, state.total_bytes


def bar_words(state: "IngestProgress", elapsed_s: float) -> str:
    """What stands beside a phase's bar after so long: rates, bytes, and the time left."""
    elapsed_s = max(elapsed_s, 0.1)
    if state.phase == "index":
        return ""
    if state.phase in ("encode", "neighbours"):
        words = [f"{state.num_chunks:,} of {state.total_chunks or 0:,} chunks"]
        if state.num_tokens:
            words.append(f"{state.num_tokens / elapsed_s:,.0f} tokens/s")
        if state.total_kv_bytes:
            words.append(f"{size_text(state.kv_bytes)} of {size_text(state.total_kv_bytes)}")
    else:
        words = [f"{state.num_chunks:,} chunks", f"{state.num_chunks / elapsed_s:,.0f}/s"]
    _, done, total = measure_of(state)
    left_s = state.eta_s
    if left_s is None and total and done:
        left_s = elapsed_s / done * (total - done)
    if left_s is not None:
        words.append(f"{time_text(left_s)} left")
    return " · ".join(words)


def announcement(state: "IngestProgress", seconds_for: Callable[[int], float | None]) -> str | None:
    """How much chunk KV there will be, before the first of it is made; None at other times."""
    if state.phase != "encode" or state.num_chunks or state.total_kv_bytes is None:
        return None
    words = f"chunk KV of {state.total_chunks:,} chunks: about {size_text(state.total_kv_bytes)}"
    seconds = seconds_for(state.total_tokens)
    return words if seconds is None else f"{words}, about {time_text(seconds)}"
