"""Scores of an answer against known ones, each from 0 to 1, the best over the known ones.

em         the same words: lower case, without punctuation, articles and extra space
f1         harmonic mean of precision and recall of those words
rouge_l    the same of the longest common subsequence of words, articles counted
contained  a known answer stands in the answer, word for word
all        of all known answers the share that stands in it (needles: RULER's string match)
"""

import re
from collections.abc import Sequence

from kvweave.calibrate.answer_scores import exact_match, normalise, token_f1

NAMES = ("em", "f1", "rouge_l", "contained")
_WORD = re.compile(r"\w+")


def score(answer: str, golds: Sequence[str]) -> dict[str, float]:
    """Every score of an answer. `golds` must not be empty."""
    return {
        "em": exact_match(answer, golds),
        "f1": token_f1(answer, golds),
        "rouge_l": max(rouge_l(answer, gold) for gold in golds),
        "contained": float(any(contains(answer, gold) for gold in golds)),
    }


def share_contained(answer: str, golds: Sequence[str]) -> float:
    """Of the known answers the share that stands in the answer."""
    return sum(contains(answer, gold) for gold in golds) / len(golds)


def contains(answer: str, gold: str) -> bool:
    """Whether the words of `gold` stand in the answer, one behind the other."""
    words = normalise(gold)
    return bool(words) and f" {words} " in f" {normalise(answer)} "


def rouge_l(answer: str, gold: str) -> float:
    """F1 of the longest common subsequence of words."""
    words, wanted = (_WORD.findall(text.lower()) for text in (answer, gold))
    common = _longest_common(words, wanted)
    return 2 * common / (len(words) + len(wanted)) if common else 0.0


def _longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many words the longest common subsequence has."""
    before = [0] * (len(other) + 1)
    for word in one:
        now = [0]
        for i, each in enumerate(other):
            now.append(before[i] + 1 if word == each else max(before[i + 1], now[i]))
        before = now
    return before[-1]
