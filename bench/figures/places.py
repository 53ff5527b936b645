"""Where do the rows lie that selectors choose (FusionRAG, figure 8)?

The 15 % of the hits that CacheBlend, FusionRAG and QCFuse choose: by their place in the chunk and
by chunk. A chunk's or a place's share is over its share of all hits, so 1 is even.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from figures.lab import Lab, Question, Way
from kvweave.calibrate.case import Case
from kvweave.fuse.selectors.strategies import open_strategy

RATIO = 0.15
NAMES = ("cacheblend", "fusionrag", "qcfuse")
# places in a chunk, from its first token on
PLACES = {"0-3": (0, 4), "4-15": (4, 16), "16-63": (16, 64), "64-": (64, 1 << 30)}


class Place(NamedTuple):
    """Where a token of a prompt lies."""

    chunk: int  # from 0
    token: int  # in the chunk, from 0
    share: float  # of the chunk that stands in front of it


def place_in_chunk(positions: Sequence[int], case: Case) -> list[Place]:
    """The place of each position of a prompt, all of them in chunks."""
    starts = np.cumsum([len(case.front), *map(len, case.chunks)])
    found = []
    for position in positions:
        chunk = int(np.searchsorted(starts, position, side="right")) - 1
        token = int(position - starts[chunk])
        found.append(Place(chunk, token, token / len(case.chunks[chunk])))
    return found


def count_places(lab: Lab, question: Question) -> dict[str, Any]:
    """How often each place is chosen, over how often it would be if all were alike."""
    every = place_in_chunk(question.stitch("isolated").request.hits, question.case)
    found: dict[str, Any] = {}
    for name in NAMES:
        way = Way(name, open_strategy(name, lab.facts), RATIO)
        chosen = place_in_chunk(question.fuse(way).recomputed, question.case)
        found[name] = {
            "by_place": lift([_name_of(p) for p in chosen], [_name_of(p) for p in every]),
            "by_tenth": lift([_tenth(p) for p in chosen], [_tenth(p) for p in every]),
            "by_chunk": lift([str(p.chunk + 1) for p in chosen], [str(p.chunk + 1) for p in every]),
        }
    return found


def lift(chosen: Sequence[str], every: Sequence[str]) -> dict[str, float]:
    """The share of each name among the chosen over its share among all."""
    some, whole = Counter(chosen), Counter(every)
    return {n: some[n] / len(chosen) / (whole[n] / len(every)) for n in sorted(whole)}


def _name_of(place: Place) -> str:
    return next(name for name, (low, high) in PLACES.items() if low <= place.token < high)


def _tenth(place: Place) -> str:
    return str(int(10 * place.share))


def sum_up_places(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over questions, by strategy."""
    found: dict[str, Any] = {"n": len(values), "ratio": RATIO}
    for name in NAMES:
        found[name] = {}
        for by in ("by_place", "by_tenth", "by_chunk"):
            keys = sorted({key for value in values for key in value[name][by]})
            found[name][by] = {
                key: round(
                    float(np.mean([v[name][by][key] for v in values if key in v[name][by]])), 3
                )
                for key in keys
            }
    return found
