"""Seconds to the first token at matched quality (QCFuse, figures 10 and 11), for a quiet machine.

Chunk KV and anchors lie in memory; a run stitches, chooses rows and computes. Ways take turns, full
prefill is one of them, and a question's time is the median of its runs. What loading adds is in
bench/bandwidth/run.py. Quality of the same ratios comes from `--part matched`, the newest run of it
in `--out` with the same model.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.measuring import alternate, medians
from figures.lab import Question, Way
from kvweave.calibrate.trials import Trials
from kvweave.fuse.fuse import fuse
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.stitched import stitch

REPEATS = 5


def time_ways(question: Question, ways: Sequence[Way]) -> dict[str, float]:
    """Median seconds of each way and of full prefill, on one question."""
    lab, case = question.lab, question.case
    kv = Trials(lab.decoder, 1, case.num_tokens, 0).kv(0)
    front = lab.prefixes.prefix_for(case.preamble)

    def full() -> None:
        request = case.request((), first_is_exact=False)
        fuse(stitch(lab.decoder, request, front, ComputedChunks([]), kv))

    for way in ways:
        question.fuse(way, kv)  # what lies beside the chunk KV is made once, before the clock runs
    runs: dict[str, Any] = {"full": full}
    for way in ways:
        runs[str(way)] = lambda way=way: question.fuse(way, kv)
    return medians(alternate(runs, REPEATS))


def sum_up_times(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean over questions of each way's time, in ms and as a share of full prefill's."""
    names = [name for name in values[0] if name == "full" or "/" in name]
    seconds = {name: np.array([value[name] for value in values]) for name in names}
    rows = [
        {
            "way": name,
            "ms": round(1000 * float(each.mean()), 2),
            "over_full": round(float((each / seconds["full"]).mean()), 4),
        }
        for name, each in seconds.items()
    ]
    return {"n": len(values), "rows": rows}
