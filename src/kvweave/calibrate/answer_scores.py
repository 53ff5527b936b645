"""Answers against gold answers: exact match and token F1, best over the golds.

Both compare after lower case, without punctuation, articles and extra space.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

_DROPPED = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_DROPPED)).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """1 if the answer is one of `golds`, else 0."""
    return float(any(normalise(answer) == normalise(gold) for gold in golds))


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words."""
    return max(_f1(normalise(answer).split(), normalise(gold).split()) for gold in golds)


def _f1(words: list[str], gold: list[str]) -> float:
    common = sum((Counter(words) & Counter(gold)).values())
    if not common:
        return float(words == gold)
    precision, recall = common / len(words), common / len(gold)
    return 2 * precision * recall / (precision + recall)
