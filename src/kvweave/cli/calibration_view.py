"""Calibration for people: progress, tables, a bar per layer, and the choice in one line."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from kvweave.calibrate.gate import Cell, Table
    from kvweave.calibrate.profiles import LayerProfile

BAR_WIDTH = 40
PIPE_WIDTH = 120


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Count and time left on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeLeft())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def show_tables(
    tables: "Sequence[Table]", choices: "Mapping[str, Cell | None]", bound: float
) -> None:
    """One table per encoding, each ending in its choice; then, of several, the cheapest."""
    from kvweave.calibrate.gate import ENOUGH_QUESTIONS, FEWEST_QUESTIONS, cheapest, is_within

    console = _console()
    for table in tables:
        console.print(
            f"[bold]{table.encoding}[/] · {table.num_questions} questions of {table.data} · "
            f"{table.mean_prompt_tokens:,.0f} tokens · {table.dtype}"
        )
        headings = [
            "strategy",
            "ratio",
            "work",
            "KL",
            "KL ≤",
            "p95",
            "flips",
            "close",
            "top-1",
            "gone",
        ]
        gold = table.num_with_answers > 0
        headings += ["NLL gap", "F1", "EM"] if gold else ["NLL gap"]
        grid = _grid(headings)
        for cell in table.cells:
            gap = cell.gold_nll_gap if gold else cell.nll_gap
            row = [
                f"[green]{cell.strategy}[/]" if is_within(cell, bound) else cell.strategy,
                f"{cell.ratio:g}",
                f"{cell.work:.0%}",
                f"{cell.kl:.4f}",
                f"{cell.kl_high:.4f}",
                f"{cell.kl_p95:.3f}",
                f"{cell.flips:.0%}",
                f"{cell.close:.0%}",
                f"{cell.top1:.0%}",
                "" if cell.recovered is None else f"{cell.recovered:.0%}",
                "" if gap is None else f"{gap:+.3f}",
            ]
            scores = (cell.f1, cell.em) if gold else ()
            row += ["" if score is None else f"{100 * score:.1f}" for score in scores]
            grid.add_row(*row)
        console.print(grid)
        if table.full_f1 is not None and table.full_em is not None:
            console.print(
                f"[dim]full prefill: F1 {100 * table.full_f1:.1f}, EM {100 * table.full_em:.1f}; "
                f"everything recomputed: KL {table.noise:.1e} at most[/]"
            )
        console.print(_words(choices[table.encoding], bound))
        if FEWEST_QUESTIONS <= table.num_questions < ENOUGH_QUESTIONS:
            console.print(
                f"[yellow]{table.num_questions} questions: intervals of KL are taken "
                f"{(ENOUGH_QUESTIONS / table.num_questions) ** 0.5:.1f} times as wide, and fewer "
                f"than {3 / table.num_questions:.0%} of first tokens changing is all that no flip "
                f"among them proves (95 %); {ENOUGH_QUESTIONS} questions say more[/]"
            )
        elif table.num_questions < ENOUGH_QUESTIONS:
            console.print(
                f"[yellow]{table.num_questions} questions are few; take {ENOUGH_QUESTIONS} or more "
                "before you trust this[/]"
            )
        console.print()
    if len(tables) > 1:
        console.print(_summary(cheapest(choices), choices, tables, bound))


def show_layers(profile: "LayerProfile") -> None:
    """Recall per layer as bars, then the curve over the best together."""
    console = _console()
    console.print(
        f"Recall@10 % of {profile.num_samples} samples, {profile.mean_context_tokens:,.0f} "
        "context tokens"
    )
    grid = _grid(["layer", "recall", "95 %", ""])
    most = max(*profile.recall, 1e-9)
    for layer, recall in enumerate(profile.recall):
        bar = "█" * round(BAR_WIDTH * recall / most)
        style = "green" if layer in profile.critical else "dim"
        interval = f"{profile.recall_low[layer]:.2f}–{profile.recall_high[layer]:.2f}"
        grid.add_row(str(layer), f"{recall:.3f}", interval, f"[{style}]{bar}[/]")
    console.print(grid)
    curve = _grid(["best layers", "together"])
    for k, recall in enumerate(profile.curve, start=1):
        curve.add_row(" ".join(map(str, profile.order[:k])), f"{recall:.3f}")
    curve.add_row("all", f"{profile.all_layers:.3f}")
    curve.add_row("all, full context", f"{profile.full_context:.3f}")
    console.print(curve)
    console.print(f"critical layers: [bold]{', '.join(map(str, profile.critical))}[/]")


def _words(chosen: "Cell | None", bound: float) -> str:
    if chosen is None:
        return (
            f"[bold]exact[/]: nothing stays below {bound:g} nats with its whole interval and keeps "
            "98 % of the first tokens"
        )
    return (
        f"[bold]{chosen.strategy} at {chosen.ratio:g}[/] is the cheapest within {bound:g} nats: "
        f"{chosen.work:.0%} of full prefill's work, KL {chosen.kl:.4f}"
    )


def _summary(
    name: str | None,
    choices: "Mapping[str, Cell | None]",
    tables: "Sequence[Table]",
    bound: float,
) -> str:
    """Which of several encodings to take: `name`, or if none has a choice the least bad one."""
    chosen = None if name is None else choices[name]
    if chosen is None:
        cells = [(table.encoding, cell) for table in tables for cell in table.cells]
        name, best = min(cells, key=lambda each: each[1].kl_high)
        return (
            f"[bold]exact[/] behind all {len(choices)} encodings; {name} has the lowest KL: "
            f"{best.strategy} at {best.ratio:g}, KL ≤ {best.kl_high:.4f}, flips {best.flips:.0%}"
        )
    return (
        f"[bold]{name}[/] is the cheapest of {len(choices)} encodings within {bound:g} nats: "
        f"{chosen.strategy} at {chosen.ratio:g}, {chosen.work:.0%} of full prefill's work, "
        f"KL {chosen.kl:.4f}"
    )


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PIPE_WIDTH  # a file has no edge to cut numbers at
    return console


def _grid(headings: Sequence[str]) -> "RichTable":
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        left = heading in ("strategy", "", "best layers")
        grid.add_column(heading, justify="left" if left else "right", no_wrap=True)
    return grid
