"""Notices an answer that only repeats itself.

A small model can fall into a loop: the same words again and again until the room is used up. An
answer is in a loop when its end has a period: every token equals the one so many tokens before it.
Lists, tables, code and numbers that count differ in a token here and there, which ends the run; a
rule of dashes or a row of zeros is a period indeed, but a short one.
"""

import numpy as np

LONGEST_PERIOD = 64  # tokens; what repeats after more is not looked for
LEAST_REPEATS = 4  # the same words so often, one behind the other, and
LEAST_TOKENS = 96  # so many tokens in all make a loop


def loop_tokens(period: int) -> int:
    """Tokens that a run of this period has when it counts as a loop."""
    return max(LEAST_REPEATS * period, LEAST_TOKENS)


_PERIODS = np.arange(LONGEST_PERIOD, 0, -1)
# matches in a row that a run has by then: its first period has nothing to match
_ENOUGH = np.maximum(LEAST_REPEATS * _PERIODS, LEAST_TOKENS) - _PERIODS
_NOTHING = -1  # no token id


class LoopWatch:
    """Reads the tokens of one answer as they come. A fixed small amount of work for each."""

    def __init__(self) -> None:
        self._last = np.full(2 * LONGEST_PERIOD, _NOTHING, dtype=np.int64)
        self._end = LONGEST_PERIOD  # the last tokens are those in front of it
        self._matches = np.zeros(LONGEST_PERIOD, dtype=np.int64)  # in a row, longest period first

    def push(self, token_id: int) -> bool:
        """Take a token in. True: the answer is in a loop."""
        start = self._end - LONGEST_PERIOD
        self._matches += 1
        self._matches *= self._last[start : self._end] == token_id
        if self._end == len(self._last):
            self._last[:LONGEST_PERIOD] = self._last[LONGEST_PERIOD:]
            self._end = LONGEST_PERIOD
        self._last[self._end] = token_id
        self._end += 1
        return bool((self._matches >= _ENOUGH).any())
