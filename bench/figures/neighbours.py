"""What do similar chunks in front of a stored one bring (FusionRAG, figures 7b, 16 and 17)?

Every chunk but the first is encoded behind its nearest passages of a knowledge base of Wikipedia
passages (MiniLM), as `neighbours:N` does: preamble, fixed filler, neighbours, chunk. Beside it
stands the filler alone, which is no neighbour of anything, and nothing (`isolated`).

    outcomes     plain reuse, and FusionRAG at 5 %, by number of neighbours; CacheBlend, Cache-Craft
                 and FusionRAG at 15 %, isolated and behind ten
    deviation    of layer 2 (deviation.py), over that of isolated chunk KV
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from figures.deviation import SECOND, deviations
from figures.lab import Lab, Question, Way, encode_behind
from figures.ways import sum_up_ways
from kvweave.calibrate.questions import Passage
from kvweave.fuse.encode.contexts import ISOLATED, neighbour_prefix
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import REUSE
from kvweave.text.prompt import Document, chunk_text

COUNTS = (2, 5, 10, 15)
FILLER = "filler:4"  # that stands in front of neighbours, too
MANY = "neighbours:10"  # what the paper recommends
ENCODINGS = (ISOLATED, FILLER, *(f"neighbours:{count}" for count in COUNTS))

# The nearest passages of a passage, nearest first: at most so many.
Nearest = Callable[[Passage, int], Sequence[Passage]]


def neighbour_ways(lab: Lab) -> list[Way]:
    """Every strategy behind every encoding that the two figures compare."""
    fusionrag = open_strategy("fusionrag", lab.facts)
    ways = [Way("reuse", REUSE, 0.0, encoding) for encoding in ENCODINGS]
    ways += [Way("fusionrag", fusionrag, 0.05, encoding) for encoding in ENCODINGS]
    return ways + [
        Way(name, open_strategy(name, lab.facts), 0.15, encoding)
        for encoding in (ISOLATED, MANY)
        for name in ("cacheblend", "cachecraft-like", "fusionrag")
    ]


def measure_neighbours(
    lab: Lab, question: Question, ways: Sequence[Way], nearest: Nearest
) -> dict[str, Any]:
    """Outcomes of one question by way, and the deviation of layer 2 by encoding."""
    give_neighbours(lab, question, nearest)
    off: dict[str, Any] = {}
    for encoding in ENCODINGS:
        off[encoding] = float(deviations(question, question.stitch(encoding))[SECOND].mean())
    outcomes = {name: list(each) for name, each in question.try_ways(ways).items()}
    return {"full": question.full.score, "deviation": off, **outcomes}


def give_neighbours(lab: Lab, question: Question, nearest: Nearest) -> None:
    """Compute the question's chunk KV behind 2 to 15 neighbours. A neighbour's own KV is computed
    once, right behind the filler."""
    case, tokenizer = question.case, lab.tokenizer
    front = lab.context(case.preamble, FILLER)
    bare = lab.context(case.preamble, ISOLATED)
    found: list[list[tuple[int, ...]]] = []
    for passage in question.posed.passages[1:]:
        near = nearest(passage, max(COUNTS))
        texts = [chunk_text(Document(each.text, each.title)) for each in near]
        found.append([tuple(tokenizer.encode_text(text)) for text in texts])
    unique = list(dict.fromkeys(ids for near in found for ids in near))
    alone = dict(zip(unique, encode_behind(lab, unique, [front] * len(unique)), strict=True))
    for count in COUNTS:
        behind = [bare]
        for near in found:
            taken = [(ids, alone[ids]) for ids in near[:count]]
            behind.append(neighbour_prefix(lab.decoder, front, taken))
        made = encode_behind(lab, case.chunks, behind)
        question.give(f"neighbours:{count}", made, behind)


def sum_up_neighbours(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of the outcomes, and mean deviations over that of isolated chunk KV."""
    found = sum_up_ways(values)
    table = np.array([[value["deviation"][name] for name in ENCODINGS] for value in values])
    mean = table.mean(0)
    less = {name: round(float(x / mean[0]), 4) for name, x in zip(ENCODINGS, mean, strict=True)}
    return {**found, "deviation_over_isolated": less, "deviation": round(float(mean[0]), 4)}
