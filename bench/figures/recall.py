"""How many tokens of the answer does a question find over anchors (QCFuse, figure 6)?

SQuAD questions whose answers are marked, in 2,000 tokens of other passages. The question is pushed
over anchors by a rule and a share, and all chunk tokens are ranked by what it looks at then.
`recall` is the share of the answer's tokens in the best 10 %, `same` the share of the best 10 %
that a push over the full context ranks so, too; both at the layers of the profile and at all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from figures.attention import overlap
from figures.lab import Lab, Question
from kvweave.calibrate.layer_profile import recall_at
from kvweave.fuse.encode.extras import RULES, extra_name
from kvweave.fuse.selector import Scene
from kvweave.fuse.selectors.query_attention import QueryAttention

SHARES = (0.05, 0.1, 0.2, 0.5)
TOP = 0.1
FULL = "full context"
NONE = "no anchors"


def measure_recall(lab: Lab, question: Question) -> dict[str, Any]:
    """Recall of one question by view and layers."""
    names = {f"{rule} {share:.0%}": extra_name(rule, share) for rule in RULES for share in SHARES}
    scene = question.scene("isolated", tuple(names.values()))
    gold = torch.isin(scene.hits, torch.tensor(question.case.gold))
    if not gold.any():  # the answer stands in the first chunk alone, which is exact
        return {}
    taken = list(lab.facts.critical_layers)
    full = _layer_scores(lab, scene, "full")
    scores = {FULL: full, NONE: _layer_scores(lab, scene, "preamble")}
    for name, extra in names.items():
        scores[name] = _layer_scores(lab, scene, "anchors", extra)
    found = {}
    for name, each in scores.items():
        found[name] = [
            recall_at(each[taken].sum(0), gold),
            recall_at(each.sum(0), gold),
            overlap(each[taken].sum(0), full[taken].sum(0), TOP),
            overlap(each.sum(0), full.sum(0), TOP),
        ]
    return found


def _layer_scores(lab: Lab, scene: Scene, view: Any, extra: str = "") -> Tensor:
    """[L, H] of a question pushed over a view."""
    selector = QueryAttention(
        view=view,
        layers=tuple(range(lab.num_layers)),
        rows="mean",
        heads="mean",
        anchors=extra or extra_name("kvzip"),
    )
    return selector.layer_scores(scene).float()


def sum_up_recall(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the questions whose answer lies in a stored chunk."""
    kept = [value for value in values if FULL in value]
    names = ("recall", "recall_all_layers", "same", "same_all_layers")
    views = [name for name in kept[0] if isinstance(kept[0][name], list)]
    rows = []
    for view in views:
        mean = np.array([value[view] for value in kept]).mean(0)
        rows.append({"view": view, **dict(zip(names, mean.round(4).tolist(), strict=True))})
    return {"n": len(kept), "rows": rows}
