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
    """How often each place is chosen, and how often it is there."""
    every = place_in_chunk(question.stitch("isolated").request.hits, question.case)
    found: dict[str, Any] = {}
    for name in NAMES:
        way = Way(name, open_strategy(name, lab.facts), RATIO)
        chosen = place_in_chunk(question.fuse(way).recomputed, question.case)
        found[name] = {
            by: count([name(place) for place in chosen], [name(place) for place in every])
            for by, name in (("by_place", _name_of), ("by_tenth", _tenth), ("by_chunk", _chunk))
        }
    return found


def count(chosen: Sequence[str], every: Sequence[str]) -> dict[str, tuple[int, int]]:
    """How often each name is among the chosen, and among all."""
    some, whole = Counter(chosen), Counter(every)
    return {name: (some[name], whole[name]) for name in sorted(whole)}


def lift(counts: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, float]:
    """The share of each name among the chosen over its share among all, of all questions together:
    short chunks count as little as they are."""
    some, whole = Counter[str](), Counter[str]()
    for each in counts:
        for name, (chosen, every) in each.items():
            some[name] += chosen
            whole[name] += every
    share = some.total() / whole.total()
    return {name: some[name] / whole[name] / share for name in sorted(whole)}


def _name_of(place: Place) -> str:
    return next(name for name, (low, high) in PLACES.items() if low <= place.token < high)


def _chunk(place: Place) -> str:
    return str(place.chunk + 1)


def _tenth(place: Place) -> str:
    return str(int(10 * place.share))


def sum_up_places(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lifts by strategy, of all questions together."""
    found: dict[str, Any] = {"n": len(values), "ratio": RATIO}
    for name in NAMES:
        found[name] = {
            by: {key: round(each, 3) for key, each in lift([v[name][by] for v in values]).items()}
            for by in ("by_place", "by_tenth", "by_chunk")
        }
    return found
