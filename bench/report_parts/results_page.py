"""docs/results.md: every bench with its question, its command and its figures."""

import re
from collections.abc import Collection, Iterator
from functools import cache
from typing import NamedTuple

from common.files import REPO, RESULTS
from common.results import read_results
from report_parts.figures import Result, Run, show
from report_parts.shown import SHOWN

OLDER = "†"  # behind a figure whose code has changed since
PAGE = REPO / "docs" / "results.md"

HEAD = f"""# Results

Made by `make results` from `bench/results/`; do not edit it. A figure is of the newest run that
has it. {OLDER} means that the code it measures was changed behind that run: it may be another
figure today (`python bench/report.py --ages` counts the commits). Which code that is stands in
`bench/report_parts/shown.py`. How these compare with the papers is in [coverage.md](coverage.md).
"""


class RunKey(NamedTuple):
    """Names a run on the page."""

    file: str
    date: str  # the day
    commit: str


class Row(NamedTuple):
    """What the table of bench/README.md says of a result file."""

    group: str
    command: str


def key_of(file: str, run: Run) -> RunKey:
    return RunKey(file, run["date"][:10], run["commit"])


def runs_on_the_page() -> Iterator[tuple[Result, Run]]:
    """Each run that a figure is from, once per result."""
    for result in SHOWN:
        shown = {
            key_of(result.file, run): run for _, run in (show(result, f) for f in result.figures)
        }
        yield from ((result, run) for run in shown.values())


def marked_in(page: str) -> set[RunKey]:
    """The runs that a page says are older than what they measure."""
    marked, file = set(), ""
    for line in page.splitlines():
        if found := re.search(r"bench/results/([\w-]+)\.json", line):
            file = found[1]
        elif found := re.search(rf"\| (\d{{4}}-\d\d-\d\d) · (\S+?){OLDER} · ", line):
            marked.add(RunKey(file, found[1], found[2]))
    return marked


def render(older: Collection[RunKey]) -> str:
    """The page; nothing but the results and `older` changes it."""
    rows = table_of_benches()
    parts, group = [HEAD], ""
    for file in rows:
        if rows[file].group != group:
            group = rows[file].group
            parts.append(f"## {group}\n")
        parts.append(_section(_by_file()[file], rows[file], older))
    return "\n".join(parts)


@cache
def table_of_benches() -> dict[str, Row]:
    """Result file → its line of bench/README.md, in the order there."""
    found, group = {}, ""
    for line in (REPO / "bench" / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 5:
            continue
        if heading := re.fullmatch(r"\*\*(.+)\*\*", cells[0]):
            group = heading[1]
        for file in re.findall(r"`([\w-]+)\.json`", cells[2]):
            found[file] = Row(group, cells[1])
    return found


@cache
def _by_file() -> dict[str, Result]:
    return {result.file: result for result in SHOWN}


def _section(result: Result, row: Row, older: Collection[RunKey]) -> str:
    path = RESULTS / f"{result.file}.json"
    question = read_results(path)["question"]
    lines = [
        f"### {question}",
        "",
        f"{row.command} · [{path.name}](../bench/results/{path.name})",
        "",
        "| figure | value | run |",
        "|---|---|---|",
    ]
    for figure in result.figures:
        text, run = show(result, figure)
        mark = OLDER if key_of(result.file, run) in older else ""
        when = f"{run['date'][:10]} · {run['commit']}{mark} · {run['device']}"
        lines.append(f"| {figure.says} | {text}{mark} | {when} |")
    if result.published:
        lines += ["", f"Published: {result.published}"]
    if path.with_suffix(".svg").is_file():
        lines += ["", f"![{question}](../bench/results/{path.stem}.svg)"]
    return "\n".join([*lines, ""])
