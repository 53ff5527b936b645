"""What audits of one strategy at one ratio say, and how sure it is.

KL of an answer is the mean of KL(full ‖ fused) over its first tokens: not negative, else anything.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

SURE = math.log(20.0)  # evidence: 1 in 20 at most, if there were nothing to be found
STAKES = np.array([0.05, 0.1, 0.2, 0.4, 0.8])  # none is best for all: all are held
ROUNDING = 1e-6  # nats: a bound below is none that arithmetic could hold
TIMES = (2.0, 4.0, 8.0, 16.0)  # a share of flips that is so many times too large


class AuditFigures(NamedTuple):
    """Of the answers of one strategy at one ratio that are remembered."""

    answers: int = 0  # audited
    kl: float = 0.0  # mean over them, nats per token
    kl_low: float = 0.0  # its 95 % interval, as if there were no other look at it
    kl_high: float = math.inf
    flips: int = 0  # answers whose first token would have been another

    @classmethod
    def of(cls, kl: Sequence[float], flips: Sequence[bool]) -> "AuditFigures":
        count = len(kl)
        if not count:
            return cls()
        values = np.asarray(kl)
        mean = float(values.mean())
        if count == 1:
            return cls(1, mean, flips=sum(flips))
        half = _t95(count - 1) * float(values.std(ddof=1)) / math.sqrt(count)
        return cls(count, mean, max(0.0, mean - half), mean + half, sum(flips))

    @property
    def flip_share(self) -> float:
        return self.flips / self.answers if self.answers else 0.0

    def document(self) -> dict[str, Any]:
        """Plain JSON; null is not known."""
        is_known = self.answers > 0
        high = round(self.kl_high, 6) if math.isfinite(self.kl_high) else None
        return {
            "answers": self.answers,
            "kl": round(self.kl, 6) if is_known else None,
            "kl_low": round(self.kl_low, 6) if high is not None else None,
            "kl_high": high,
            "flips": self.flips,
        }


class AuditNote(NamedTuple):
    """What the audit has to do with one answer."""

    is_chosen: bool  # it is to be computed exactly, when nothing else is to do
    figures: AuditFigures  # of its strategy and ratio, when it was asked for

    def document(self) -> dict[str, Any]:
        return {"chosen": self.is_chosen, **self.figures.document()}


def evidence_above(kl: Sequence[float], bound: float) -> float:
    """The logarithm of the evidence that the mean is above `bound`, which may be looked at after
    every answer.

    A gambler who stakes a share of what they have on each answer's KL being above the bound gains
    nothing on average while the mean is not: e = Π (1 + stake · (kl / bound − 1)) reaches 20 with a
    chance of 1 in 20 at most, ever, however KL is distributed (Ville's inequality).
    """
    odds = np.asarray(kl, dtype=np.float64) / max(bound, ROUNDING) - 1.0
    wealth = np.log1p(STAKES[:, None] * odds[None, :]).sum(axis=1)  # [stakes]
    return float(np.logaddexp.reduce(wealth)) - math.log(len(STAKES))


def evidence_of_flips(flips: int, answers: int, most: float) -> float:
    """The same, that a larger share than `most` of the answers flips."""
    shares = [min(times * most, 0.95) for times in TIMES]
    ratios = [
        flips * math.log(share / most) + (answers - flips) * math.log((1 - share) / (1 - most))
        for share in shares
    ]
    return float(np.logaddexp.reduce(ratios)) - math.log(len(ratios))


def _t95(freedom: int) -> float:
    """Student's t at 97.5 %, a little small below three degrees of freedom."""
    return 1.96 + 2.37 / freedom + 2.82 / freedom**2
