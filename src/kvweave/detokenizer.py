"""Token ids to text as they come, and stop strings.

A token may end in the middle of a character, and the text of a token may depend on its left
neighbour. So text is decoded from a little before the new token, and held back while it ends in an
unfinished character. Belongs to one request; not for many threads.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvweave.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4  # bytes of UTF-8, so tokens; longer runs are simply not text


class Detokenizer:
    """Turns a growing list of ids into text, never splitting a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # decoding starts here, so that left neighbours are seen
        self._done = 0  # ids before this have been turned into text

    def push(self, token_id: int) -> str:
        """The text that is certain after `token_id`; often "", never half a character."""
        self._ids.append(token_id)
        text = self._pending()
        if text.endswith(UNFINISHED) and len(self._ids) - self._done < LONGEST_CHARACTER:
            return ""
        return self._take(text)

    def flush(self) -> str:
        """What is left at the end; an unfinished character shows as U+FFFD."""
        return self._take(self._pending())

    def _pending(self) -> str:
        before = self._decode(self._ids[self._context : self._done])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _take(self, text: str) -> str:
        self._context, self._done = self._done, len(self._ids)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=True)


class Cut(NamedTuple):
    """What a stop matcher lets through."""

    text: str
    stopped: bool  # a stop string was found; nothing more comes


class StopMatcher:
    """Lets text through up to the first stop string, which itself never appears.

    The end of the text is held back while it may still become a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Cut:
        self._held += text
        found = [i for stop in self._stops if (i := self._held.find(stop)) >= 0]
        if found:
            return Cut(self._held[: min(found)], True)
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(out) :]
        return Cut(out, False)

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        out, self._held = self._held, ""
        return out

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if stop.startswith(self._held[-n:])), 0)
