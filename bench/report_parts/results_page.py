"""docs/results.md: every bench with its question, its command and its figures."""

import re
from collections.abc import Collection, Iterator
from functools import cache
from typing import NamedTuple

from common.files import REPO, RESULTS
from common.results import read_results
from kvweave.cli.bench import Bench, read_table
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
    benches = read_table()
    parts, group = [HEAD], ""
    for file, bench in benches.items():
        if bench.group != group:
            group = bench.group
            parts.append(f"## {group}\n")
        parts.append(_section(_by_file()[file], bench, older))
    return "\n".join(parts)


@cache
def _by_file() -> dict[str, Result]:
    return {result.file: result for result in SHOWN}


def _section(result: Result, bench: Bench, older: Collection[RunKey]) -> str:
    path = RESULTS / f"{result.file}.json"
    question = read_results(path)["question"]
    commands = ", ".join(f"`{each}`" for each in bench.commands)
    lines = [
        f"### {question}",
        "",
        f"{commands} · [{path.name}](../bench/results/{path.name})",
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
    for picture in bench.pictures:
        lines += ["", f"![{question}](../bench/results/{picture})"]
    return "\n".join([*lines, ""])
