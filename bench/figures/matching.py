"""At which ratio does one strategy reach the quality of another, and at what work?

Mean KL falls with the ratio; between two measured ratios its logarithm is taken as linear. A curve
that rises somewhere is taken as if it stayed, so that a target has one answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DRAWS = 1000
TARGETS = (0.1, 0.15, 0.3, 0.5)  # ratios of the one whose KL the other is to reach


def ratio_reaching(ratios: Sequence[float], kls: Sequence[float], target: float) -> float | None:
    """The lowest ratio at which a falling curve reaches `target`; None: it does not within them.

    A target above the first point gives the first ratio: nothing is known of lower ones.
    """
    falling = np.minimum.accumulate(np.asarray(kls, dtype=float))
    if target < falling[-1]:
        return None
    if target >= falling[0]:
        return float(ratios[0])
    after = int(np.argmax(falling <= target))
    high, low = np.log(falling[after - 1]), np.log(falling[after])
    share = (high - np.log(target)) / (high - low)
    return float(ratios[after - 1] + share * (ratios[after] - ratios[after - 1]))


def match_quality(
    ratios: Sequence[float], curves: Mapping[str, np.ndarray], costs: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """For both of two strategies, the other's ratio and cost at its KL.

    `curves` are KLs [questions, ratios]; `costs` one of each ratio: work, or seconds. `saves` is
    the one's cost over that of the other at equal KL: above 1 the other is cheaper.
    """
    (one, other) = curves
    count = len(curves[one])
    draws = np.random.default_rng(0).integers(0, count, (DRAWS, count))
    rows = []
    for given, asked in ((one, other), (other, one)):
        for ratio in TARGETS:
            at = list(ratios).index(ratio)
            target = curves[given].mean(0)[at]
            reached = ratio_reaching(ratios, curves[asked].mean(0), target)
            found = [
                ratio_reaching(ratios, curves[asked][d].mean(0), curves[given][d].mean(0)[at])
                for d in draws
            ]
            # beyond the highest ratio measured counts as above it
            low, high = np.quantile([2.0 if f is None else f for f in found], [0.025, 0.975])
            cost = None if reached is None else float(np.interp(reached, ratios, costs[asked]))
            rows.append(
                {
                    "of": given,
                    "ratio": ratio,
                    "kl": round(float(target), 5),
                    "by": asked,
                    "needs": _rounded(reached),
                    "needs_ci": [_rounded(None if x > 1 else float(x)) for x in (low, high)],
                    "cost": round(costs[given][at], 4),
                    "cost_by": _rounded(cost),
                    "saves": None if cost is None else round(costs[given][at] / cost, 3),
                }
            )
    return rows


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
