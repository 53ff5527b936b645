"""The tokens of an answer as they come: their text, stop strings, and whether they only repeat.

A token may end in the middle of a character, and the text of a token may depend on its left
neighbour. So a window of the last few tokens is decoded each time, and what it adds is given out,
less what may be an unfinished character at its end.

A small model can fall into a loop: the same words again and again until the room is used up. An
answer is in a loop when its end has a period: every token equals the one so many tokens before it.
Lists, tables, code and numbers that count differ in a token here and there, which ends the run; a
rule of dashes or a row of zeros is a period indeed, but a short one.

Each class belongs to one request; none is for many threads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvweave.text.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4  # bytes of UTF-8, so tokens
KEPT = 8  # tokens a shortened window has at least: left neighbours for the next ones
WINDOW = 24  # tokens from which on it is shortened


class Detokenizer:
    """Turns a growing list of ids into text, never splitting a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were given out

    def push(self, token_id: int) -> str:
        """The text that is certain after `token_id`; often "", never half a character."""
        if token_id in self._tokenizer.special_ids:
            return ""  # not text, and it must not come between a token and its left neighbour
        self._window.append(token_id)
        text = self._text(self._window)
        # All U+FFFD at the end: some tokenizers show every byte of a broken run as one.
        out = self._give(text, len(text.rstrip(UNFINISHED)))
        if len(self._window) >= WINDOW and not text.endswith(UNFINISHED):
            self._shorten(text)
        return out

    def flush(self) -> str:
        """What is left at the end; an unfinished character shows as U+FFFD."""
        text = self._text(self._window)
        return self._give(text, len(text))

    def _give(self, text: str, end: int) -> str:
        out = text[self._given : end]
        self._given = max(self._given, end)
        return out

    def _shorten(self, text: str) -> None:
        """Forget old tokens, cutting between characters. All of `text` has been given out."""
        for num_kept in range(KEPT, KEPT + LONGEST_CHARACTER):
            tail = self._text(self._window[-num_kept:])
            if text.endswith(tail):  # else the cut fell inside a character
                self._window = self._window[-num_kept:]
                self._given = len(tail)
                return

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=True)


class PassedText(NamedTuple):
    """The text that a stop matcher lets through."""

    text: str
    stopped: bool  # a stop string was found; nothing more comes


class StopMatcher:
    """Lets text through up to the first stop string, which itself never appears.

    First is the one that is complete first, the longest of those: however the text is cut into
    pieces, the answer ends in the same place. The end of the text is held back while it may still
    become a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> PassedText:
        self._held += text
        found = [(i + len(s), i) for s in self._stops if (i := self._held.find(s)) >= 0]
        if found:
            _, start = min(found)
            out, self._held = self._held[:start], ""
            return PassedText(out, True)
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(out) :]
        return PassedText(out, False)

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        out, self._held = self._held, ""
        return out

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if stop.startswith(self._held[-n:])), 0)


def texts_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a character of several tokens comes with its last one."""
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.push(token_id) for token_id in token_ids]
    return [*texts[:-1], texts[-1] + detokenizer.flush()] if texts else []


LONGEST_PERIOD = 64  # tokens; what repeats after more is not looked for
LEAST_REPEATS = 4  # the same words so often, one behind the other, and
LEAST_TOKENS = 96  # so many tokens in all make a loop


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
