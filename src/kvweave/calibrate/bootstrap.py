"""Intervals for means over questions, by resampling the questions.

The same resamples serve every row, so rows compare pairwise: a question that is hard for all
strategies moves all of them alike.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 2000
SEED = 0
LEVEL = 0.95  # of the two-sided interval

Values = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A mean and its two-sided 95 % interval."""

    mean: float
    low: float
    high: float


class Bootstrap:
    """Resamples of `num_questions` questions, the same in every process."""

    def __init__(self, num_questions: int, num_resamples: int = NUM_RESAMPLES) -> None:
        assert num_questions > 0, "no questions, no mean"
        rng = np.random.default_rng(SEED)
        drawn = rng.integers(num_questions, size=(num_resamples, num_questions))
        counts = np.zeros((num_resamples, num_questions))
        np.add.at(counts, (np.arange(num_resamples)[:, None], drawn), 1.0)
        self._weights = counts / num_questions  # [resamples, questions]

    def mean(self, values: Values) -> Interval:
        """The mean of one value per question."""
        return _interval(float(values.mean()), self._weights @ values)

    def recovered_share(self, values: Values, worst: Values) -> Interval | None:
        """Return 1 - mean / mean of `worst`; None where there is next to nothing to recover."""
        if worst.mean() <= 0.0:
            return None
        below = np.maximum(self._weights @ worst, np.finfo(np.float64).tiny)
        return _interval(
            float(1.0 - values.mean() / worst.mean()), 1.0 - (self._weights @ values) / below
        )


def _interval(mean: float, resampled: Values) -> Interval:
    tail = (1.0 - LEVEL) / 2
    low, high = np.quantile(resampled, [tail, 1.0 - tail])
    return Interval(mean, float(low), float(high))
