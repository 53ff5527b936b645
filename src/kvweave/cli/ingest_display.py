"""What a person sees of an ingest: how far it is, and in the end what came of it."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvweave.cli.tables import progress_text, size_text, time_text

if TYPE_CHECKING:
    from rich.progress import TaskID

    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.fuse.encode.save_log import Saves
    from kvweave.ingest.report import IngestProgress, IngestReport, OnProgress

SecondsFor = Callable[[int], float | None]  # tokens to encode; None: not known
MAX_LISTED = 20  # of skipped files, for people


@contextmanager
def progress_bar(seconds_for: SecondsFor) -> "Iterator[OnProgress]":
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


def announcement(state: "IngestProgress", seconds_for: SecondsFor) -> str | None:
    """How much chunk KV there will be, before the first of it is made; None at other times."""
    if state.phase != "encode" or state.num_chunks or state.total_kv_bytes is None:
        return None
    words = f"chunk KV of {state.total_chunks:,} chunks: about {size_text(state.total_kv_bytes)}"
    seconds = seconds_for(state.total_tokens)
    return words if seconds is None else f"{words}, about {time_text(seconds)}"


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
    complaints = Console(stderr=True, highlight=False, soft_wrap=True)
    if report.is_in_vain:
        complaints.print(f"[bold red]nothing was taken in:[/] {in_vain_words(report)}")
    else:
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
    for source, reason in report.skipped[:MAX_LISTED]:
        complaints.print(f"[yellow]skipped[/] {escape(source)}: {escape(reason)}")
    if len(report.skipped) > MAX_LISTED:
        complaints.print(f"… and {len(report.skipped) - MAX_LISTED} more; --json lists all")


def in_vain_words(report: "IngestReport") -> str:
    """Why none of the files got in."""
    skipped, ignored = len(report.skipped), report.ignored_files
    refused = [f"{skipped:,} could not be read"] if skipped else []
    unknown = [f"{ignored:,} of a kind that no parser knows"] if ignored else []
    return "of the files " + ", ".join(refused + unknown)


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
