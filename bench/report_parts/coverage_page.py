"""docs/coverage.md: every figure of the five papers, and what answers it here."""

import re
from collections import Counter
from collections.abc import Collection

from common.files import REPO
from report_parts.figures import show
from report_parts.papers import NONE, PAPERS, VERDICTS, Claim
from report_parts.results_page import OLDER, RunKey, key_of
from report_parts.shown import SHOWN

PAGE = REPO / "docs" / "coverage.md"

HEAD = f"""# The papers, figure by figure

Made by `make results`; do not edit it. What five papers claim, and what answers it here: better,
equal, worse, contradicted or mixed, or not had here and why. Numbers of ours are from
`bench/results/`; {OLDER} means that the code behind one was changed since
([results.md](results.md) has run, commit and machine). Ratios are of other machines than the
papers', GPU models have random weights, and quality is measured as KL divergence on a small model:
what is "better" is so under these conditions.
"""


def render(older: Collection[RunKey]) -> str:
    """The page; the claims, the results and `older` alone make it."""
    counts = Counter(verdict_of(claim) for claims in PAPERS.values() for claim in claims)
    tally = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    parts = [HEAD, f"Of {counts.total()} rows: {tally}.\n"]
    for paper, claims in PAPERS.items():
        rows = (_row(claim, older) for claim in claims)
        table = ["| figure | it says | ours | command | verdict |", "|---|---|---|---|---|", *rows]
        parts.append(f"## {paper}\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)


def verdict_of(claim: Claim) -> str:
    """The verdict without the words behind it."""
    for verdict in VERDICTS:
        if re.match(rf"{verdict}\b", claim.verdict):
            return verdict
    raise ValueError(f"{claim.where}: {claim.verdict!r} begins with none of {', '.join(VERDICTS)}")


def _row(claim: Claim, older: Collection[RunKey]) -> str:
    ours = fill_in(claim.ours, older)
    command = "–" if claim.command == NONE else f"`{claim.command}`"
    return f"| {claim.where} | {claim.says} | {ours} | {command} | {claim.verdict} |"


def fill_in(words: str, older: Collection[RunKey]) -> str:
    """Put the values of figures, `{FILE:name}`, into words; those of older code are marked."""
    figures = r"\{([\w-]+):(\w+)\}"
    return re.sub(figures, lambda found: _value(found[1], found[2], older), words)


def _value(file: str, name: str, older: Collection[RunKey]) -> str:
    for result in SHOWN:
        for figure in result.figures:
            if (result.file, figure.name) == (file, name):
                text, run = show(result, figure)
                return text + (OLDER if key_of(file, run) in older else "")
    raise LookupError(f"report_parts/shown.py has no figure {file}:{name}")
