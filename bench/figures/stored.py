"""QCFuse and others at matched quality, by what the quality bench has stored of 600 questions.

`bench/results/quality-h200.json` has the mean KL and the work of each at every ratio, on SmolLM2
with ten passages and more a question. No interval: it keeps means of sets, not single questions.
"""

from typing import Any

import numpy as np

from common.files import RESULTS
from common.results import read_results
from figures.matching import match_quality
from figures.ways import RATIOS

FILE = "quality-h200"
ENCODINGS = ("isolated", "filler:4")
QCFUSE = "qcfuse"
OTHERS = ("prophetkv", "cacheblend", "epic", "fusionrag", "weave")
SETS = ("2wiki", "hotpot", "musique")


def match_stored() -> dict[str, Any]:
    """QCFuse beside each other strategy, by encoding context, of the newest stored run that has
    them all; sets weigh alike."""
    for run in reversed(read_results(RESULTS / f"{FILE}.json")["runs"]):
        if {cell["strategy"] for cell in run["cells"]} >= {QCFUSE, *OTHERS}:
            break
    cells = {(c["set"], c["encoding"], c["strategy"], c["ratio"]): c for c in run["cells"]}
    found: dict[str, Any] = {"of": FILE, "date": run["date"], "commit": run["commit"]}
    found["n"] = sum(cells[name, "isolated", "qcfuse", RATIOS[0]]["n"] for name in SETS)
    for encoding in ENCODINGS:
        curves, works = {}, {}
        for name in (QCFUSE, *OTHERS):
            each = [[cells[s, encoding, name, ratio] for s in SETS] for ratio in RATIOS]
            curves[name] = np.array([[np.mean([c["kl"] for c in same]) for same in each]])
            works[name] = [float(np.mean([c["work"] for c in same])) for same in each]
        rows = []
        for other in OTHERS:
            both = (QCFUSE, other)
            rows += match_quality(
                RATIOS, {name: curves[name] for name in both}, {name: works[name] for name in both}
            )
        kls = {name: curve[0].round(5).tolist() for name, curve in curves.items()}
        found[encoding] = {"kl": kls, "rows": rows}
    return found
