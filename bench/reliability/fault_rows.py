"""One fault that was put in, and what became of it: a row of the matrix."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class FaultRow:
    """One fault that struck, and what became of it."""

    tier: str
    op: str
    kind: str
    seed: int
    times: int | None  # strikes at most
    fired: int = 0  # how often it struck
    status: int = 0  # of the request
    answer: str = ""  # full, fused, error, wrong
    seconds: float = 0.0
    extra_s: float = 0.0  # more than undisturbed
    counters: dict[str, float] = field(default_factory=dict)  # that grew
    whys: list[str] = field(default_factory=list)  # told in `explain`
    error: str = ""  # what the client was told
    recovered_s: float | None = None  # since the fault was taken out
    problems: list[str] = field(default_factory=list)


def as_json(row: FaultRow) -> dict[str, Any]:
    found = asdict(row)
    for name in ("seconds", "extra_s", "recovered_s"):
        found[name] = None if found[name] is None else round(found[name], 3)
    return found


def line_of(row: FaultRow) -> str:
    recovered = "-" if row.recovered_s is None else f"{row.recovered_s:.1f}"
    return (
        f"{row.tier:7} {row.op:24} {row.kind:16} fired {row.fired:3} {row.status:4} "
        f"{row.answer:6} +{row.extra_s:.2f} s, back after {recovered} s "
        f"{'; '.join(row.problems)}"
    )
