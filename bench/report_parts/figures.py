"""A figure: one number of a result file, with the run that it is from."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from common.files import RESULTS
from common.results import read_results

Run = Mapping[str, Any]


class Figure(NamedTuple):
    """One line of a bench on the page. Pages name it by `FILE:name`."""

    name: str
    says: str
    # the value as it is printed; a run that has it not raises a LookupError or a TypeError
    of: Callable[[Run], str]


class Shown(NamedTuple):
    """The value of a figure in the newest run that has it."""

    text: str
    run: Run


class Result(NamedTuple):
    """What one result file measures and what of it is shown."""

    file: str  # under bench/results/, without .json
    measures: tuple[str, ...]  # git pathspecs: a change there makes the result older than its code
    figures: tuple[Figure, ...]
    published: str = ""  # what papers say of the same, and how their set-up differs


@cache
def runs_of(file: str) -> Sequence[Run]:
    """All runs of a result file, oldest first. The newest has as `summary` what the file says of
    all of them together."""
    found = read_results(RESULTS / f"{file}.json")
    *earlier, newest = found.pop("runs")
    return [*earlier, {**newest, "summary": found}]


def show(result: Result, figure: Figure) -> Shown:
    """A figure that no run has is a mistake in the table, and raises."""
    for run in reversed(runs_of(result.file)):
        try:
            return Shown(figure.of(run), run)
        except (LookupError, TypeError):
            continue
    raise LookupError(f"{result.file}: no run has {figure.name!r}; see report_parts/shown.py")


def pick(rows: Sequence[Run], **wanted: Any) -> Run:
    """The row with these fields."""
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()):
            return row
    raise LookupError(f"no row with {wanted}")


def only(run: Run, *, args: str = "", device: str = "", **config: Any) -> Run:
    """The run itself, if its settings, device and arguments are these; else a LookupError."""
    pick([run["config"]], **config)
    if device not in run["device"] or args not in " ".join(run.get("args", ())):
        raise LookupError(f"another device than {device!r}, or other arguments than {args!r}")
    return run


def times(value: float) -> str:
    """A factor: 6.4×, 54×."""
    return f"{value:.0f}×" if value >= 20 else f"{value:.1f}×" if value >= 9.95 else f"{value:.2f}×"


def of_full(ratio: float) -> str:
    """A first token's time over that of full prefill."""
    return f"{ratio:.2f} of its time"


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def listed(values: Sequence[str]) -> str:
    """Values of several sets or lengths, in the order that the line names them."""
    return " / ".join(values)
