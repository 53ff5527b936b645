"""How `kvweave ingest` looks: a bar while it runs, the outcome when it is done."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.fuse.encode.save_log import Saves
    from kvweave.ingest.report import IngestProgress, IngestReport, OnProgress

MAX_LISTED = 20


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
    if report.ignored_files:
        console.print(f"[dim]{report.ignored_files:,} files of other kinds left alone[/]")
    complaints = Console(stderr=True, highlight=False, soft_wrap=True)
    for source, reason in report.skipped[:MAX_LISTED]:
        complaints.print(f"[yellow]skipped[/] {escape(source)}: {escape(reason)}")
    if len(report.skipped) > MAX_LISTED:
        complaints.print(f"… and {len(report.skipped) - MAX_LISTED} more; --json lists all")


@contextmanager
def progress_bar() -> "Iterator[OnProgress | None]":
    """Rate and time left on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[chunks]:,} chunks · {task.fields[rate]:,.0f}/s"),
        TimeLeft(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("read", total=None, chunks=0, rate=0.0)

        second: list[TaskID] = []  # a bar of its own: it starts when the first one is full

        def move(state: "IngestProgress") -> None:
            if state.phase == "neighbours":
                if not second:
                    bar.update(task, total=1, completed=1)
                    second.append(bar.add_task("neighbours", chunks=0, rate=0.0))
                elapsed_s = bar.tasks[-1].elapsed or 1.0
                bar.update(
                    second[0],
                    total=state.total_chunks,
                    completed=state.num_chunks,
                    chunks=state.num_chunks,
                    rate=state.num_chunks / max(elapsed_s, 0.1),
                )
                return
            elapsed_s = bar.tasks[0].elapsed or 1.0
            bar.update(
                task,
                description=state.phase,
                total=state.total_bytes,
                completed=state.done_bytes,
                chunks=state.num_chunks,
                rate=state.num_chunks / max(elapsed_s, 0.1),
            )

        yield move
