"""Parts that try ways to fuse a prompt: QCFuse beside ProphetKV, its anchors, its layers, needles.

Every way is judged on full prefill's own answer (KL) and by the known answer. `recovered` is the
share of the KL of plain reuse that a way takes away; intervals come from drawing questions again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from figures.lab import PLAIN_REUSE, Lab, Question, Way
from figures.matching import match_quality
from kvweave.fuse.selectors.query_attention import QueryAttention, qcfuse
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import Strategy

RATIOS = (0.05, 0.1, 0.15, 0.3, 0.5)
SHARES = (0.05, 0.1, 0.2, 0.5)  # of a chunk's tokens that anchors take
DRAWS = 2000

Values = Sequence[Mapping[str, Any]]  # of each question: outcomes by way


def matched_ways(lab: Lab) -> list[Way]:
    """QCFuse and ProphetKV at every ratio."""
    return [PLAIN_REUSE] + [
        Way(name, open_strategy(name, lab.facts), ratio)
        for name in ("qcfuse", "prophetkv")
        for ratio in RATIOS
    ]


def anchor_ways(lab: Lab) -> list[Way]:
    """QCFuse with anchors of other rules and shares, none and all."""
    layers = lab.facts.critical_layers
    named = {f"kvzip {share:.0%}": qcfuse(layers, "kvzip", share) for share in SHARES}
    named["none"] = _qcfuse_over("preamble", layers)
    named["all"] = _qcfuse_over("full", layers)
    named |= {f"{rule} 10%": qcfuse(layers, rule) for rule in ("sink", "knorm")}
    return [PLAIN_REUSE, *_swept(lab, named)]


def layer_ways(lab: Lab) -> list[Way]:
    """QCFuse scored at the first, the middle, the last, all and the profiled layers."""
    last = lab.num_layers - 1
    named = {
        "first": (0,),
        "middle": (lab.num_layers // 2,),
        "last": (last,),
        "all": tuple(range(lab.num_layers)),
        "profiled 1": lab.layer_order.order[:1],
        "profiled 3": lab.layer_order.order[:3],
    }
    return [PLAIN_REUSE, *_swept(lab, {k: _qcfuse_over("anchors", v) for k, v in named.items()})]


def needle_ways(lab: Lab) -> list[Way]:
    """Plain reuse, and rows chosen by question at two ratios."""
    return [PLAIN_REUSE] + [
        Way(name, open_strategy(name, lab.facts), ratio)
        for name in ("qcfuse", "prophetkv")
        for ratio in (0.15, 0.5)
    ]


def _qcfuse_over(view: Any, layers: tuple[int, ...]) -> QueryAttention:
    """QCFuse's scoring over another view of the context, at some layers."""
    return QueryAttention(view=view, layers=layers, normaliser="full", rows="mean", heads="mean")


def _swept(lab: Lab, named: Mapping[str, QueryAttention]) -> list[Way]:
    return [
        Way(name, Strategy(name, selector, 0.5), ratio)
        for name, selector in named.items()
        for ratio in lab.ratios
    ]


def try_ways(question: Question, ways: Sequence[Way]) -> dict[str, Any]:
    """Outcomes of one question by way, and full prefill's own score."""
    found: dict[str, Any] = {k: list(v) for k, v in question.try_ways(ways).items()}
    return {"full": question.full.score, **found}


def sum_up_ways(values: Values) -> dict[str, Any]:
    """A row of each way, and of each name the mean over its ratios."""
    names = [name for name in values[0] if "/" in name]
    table = np.array([[value[name] for name in names] for value in values])  # [n, ways, figures]
    draws = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    drawn = table[draws, :, 0].mean(1)  # [DRAWS, ways]
    reuse = names.index(str(PLAIN_REUSE)) if str(PLAIN_REUSE) in names else 0
    rows = [_row(name, table, drawn, [i], reuse) for i, name in enumerate(names)]
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(name.partition("@")[0], []).append(i)
    means = [_row(name, table, drawn, at, reuse) for name, at in groups.items() if len(at) > 1]
    full = round(float(np.mean([value["full"] for value in values])), 4)
    return {"n": len(values), "full_score": full, "rows": rows, "over_ratios": means}


def _row(
    name: str, table: np.ndarray, drawn: np.ndarray, at: Sequence[int], reuse: int
) -> dict[str, Any]:
    """Means of some ways together: figures as an Outcome has them."""
    way, _, ratio = name.partition("@")
    kl, flips, score, work = table[:, at].mean((0, 1)).tolist()
    share = 100 * (1 - drawn[:, at].mean(1) / drawn[:, reuse])
    low, high = np.quantile(share, [0.025, 0.975]).tolist()
    row = {
        "way": way,
        "kl": round(kl, 5),
        "recovered": round(100 * (1 - kl / table[:, reuse, 0].mean()), 1),
        "recovered_ci": [round(low, 1), round(high, 1)],
        "flips": round(flips, 3),
        "score": round(score, 4),
        "work": round(work, 4),
    }
    return {"way": way, "ratio": float(ratio), **row} if len(at) == 1 else row


def sum_up_matched(values: Values) -> dict[str, Any]:
    """As `sum_up_ways`, and at which ratio and work each of the two reaches the other's KL."""
    found = sum_up_ways(values)
    curves = {
        name: np.array([[v[f"isolated/{name}@{ratio:g}"][0] for ratio in RATIOS] for v in values])
        for name in ("qcfuse", "prophetkv")
    }
    works = {
        name: [float(np.mean([v[f"isolated/{name}@{r:g}"][3] for v in values])) for r in RATIOS]
        for name in curves
    }
    return {**found, "matched": match_quality(RATIOS, curves, works)}


def sum_up_tasks(values: Values) -> dict[str, Any]:
    """As `sum_up_ways`, for each task and all of them."""
    found = {"all": sum_up_ways(values)}
    for name in dict.fromkeys(value["set"] for value in values):
        found[name] = sum_up_ways([value for value in values if value["set"] == name])
    return found
