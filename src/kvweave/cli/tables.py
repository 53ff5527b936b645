"""Tables, bytes, times and progress as people read them.

On a terminal a row of a table is one line: paths lose their middle, names their end, and only prose
goes on below. In a pipe nothing is cut and nothing wraps.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

    from kvweave.app.library.kv_progress import KVProgress

PIPE_WIDTH = 10_000  # a pipe has no edge to cut at
LEAST_WIDTH = 12  # of a path that is cut
GAP = "…"


def make_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    names: Sequence[str] = (),
    paths: Sequence[str] = (),
    prose: Sequence[str] = (),
    bold: Sequence[Sequence[str]] = (),
) -> "Table":
    """A table without lines. Columns are named by their headings: those to the `right`, those that
    may be cut (`names`, `paths`), those that may wrap (`prose`). Rows in `bold` stand out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    flexible = {*names, *paths, *prose}
    for heading in headings:
        table.add_column(heading, no_wrap=heading not in flexible)
        table.columns[-1].justify = "right" if heading in right else "left"
    for row in rows:
        cells = [
            _Path(text) if heading in paths else Text(text, no_wrap=heading not in prose or None)
            for heading, text in zip(headings, row, strict=True)
        ]
        table.add_row(*cells, style="bold" if row in bold else None)
    return table


def table_console() -> "Console":
    """Where tables are printed: stdout, as wide as they want to be if that is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def cut_middle(text: str, width: int) -> str:
    """The text in `width` cells of a terminal: of one that is too long, a third from its beginning
    and the rest from its end, which is the name of a file."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    head = (width - 1) // 3
    tail = max(0, width - 1 - head)
    return set_cell_size(text, head) + GAP + set_cell_size(text[::-1], tail)[::-1]


class _Path:
    """A cell that is cut in the middle where its column is too narrow."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_measure__(self, _console: "Console", options: "ConsoleOptions") -> "Measurement":
        from rich.cells import cell_len
        from rich.measure import Measurement

        most = min(cell_len(self._text), options.max_width)
        return Measurement(min(most, LEAST_WIDTH), most)

    def __rich_console__(self, _console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        yield Text(cut_middle(self._text, options.max_width), no_wrap=True)


def size_text(num_bytes: float) -> str:
    """412 MB, 1.3 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale:
            amount = num_bytes / scale
            return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:,.0f} {unit}"
    return f"{num_bytes / 1e3:,.0f} kB"


def time_text(seconds: float) -> str:
    """40 s, 3 min, 2 h 10 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def progress_text(progress: "KVProgress") -> str:
    """KV 120 of 170 chunks, 412 MB, about 3 min left."""
    parts = [f"KV {progress.chunks_done:,} of {progress.chunks_total:,} chunks"]
    if progress.num_bytes:
        parts.append(size_text(progress.num_bytes))
    if progress.chunks_in_front:
        parts.append(f"{progress.chunks_in_front:,} also for the first place in a prompt")
    if progress.eta_s is not None:
        parts.append(f"about {time_text(progress.eta_s)} left")
    calibration = progress.calibration
    if calibration is not None and calibration.state == "measuring":
        of = f"{calibration.asked} of {calibration.most} questions"
        asked, ratio = f"asked about themselves: {of}", calibration.ratio
        parts.append(
            asked if ratio is None else f"fused at {ratio:.0%} and {asked}, whether less is enough"
        )
    elif calibration is not None and calibration.ratio is not None:
        parts.append(f"fused at {calibration.ratio:.0%} after {calibration.asked} own questions")
    if progress.state in ("full", "failed"):
        parts.append(f"{progress.state}: {progress.why}" if progress.why else progress.state)
    return ", ".join(parts)
