"""Where a text may be cut: at headings, paragraphs, sentences, words, by where its tokens end."""

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvweave.text.tokenizer import Tokenizer
    from kvweave.types import Chunk

WINDOW_CHUNKS = 32  # tokenise this many chunks' worth of text at a time: memory stays flat

SECTION = " › "  # between the title of a document and a heading in it
HEADING = re.compile(r"^#{1,6}[ \t]+\S.*$", re.MULTILINE)
PARAGRAPH = re.compile(r"\n(?:[ \t]*\n)+")
SENTENCE = re.compile(r"(?<=[.!?…])[\"'”’)\]]*[ \t]+|(?<=[。！？])|\n")
WORD = re.compile(r"\n|[^\S\n]+")
BLANK = re.compile(r"\s*")


class _Break(NamedTuple):
    """Places where a cut of one kind may fall, ascending, and how full a chunk must be for it."""

    ends: list[int]
    min_fill: float


@dataclass(frozen=True)
class TextWindow:
    """A stretch of the text with its tokens' places and its possible cuts."""

    tokenizer: "Tokenizer"
    text: str
    start: int
    max_tokens: int

    @cached_property
    def end(self) -> int:
        """Generous: English has about four characters per token."""
        return min(len(self.text), self.start + WINDOW_CHUNKS * self.max_tokens * 4)

    @cached_property
    def token_ends(self) -> list[int]:
        _, offsets = self.tokenizer.encode_with_offsets(self.text[self.start : self.end])
        return [self.start + end for _, end in offsets]

    @cached_property
    def breaks(self) -> list[_Break]:
        """Best kind first. A cut right behind a heading would tear it from its section."""
        text, start, end = self.text, self.start, self.end
        headings = [m.start() for m in HEADING.finditer(text, start, end)]
        torn: set[int] = set()
        for match in HEADING.finditer(text, start, end):
            following = min(end, skip_blank(text, match.end()))
            torn.update(range(match.end(), following + 1))
        paragraphs = [m.end() for m in PARAGRAPH.finditer(text, start, end) if m.end() not in torn]
        sentences = [m.end() for m in SENTENCE.finditer(text, start, end) if m.end() not in torn]
        words = [m.end() for m in WORD.finditer(text, start, end)]
        return [
            _Break(headings, 0.5),
            _Break(paragraphs, 0.5),
            _Break(sentences, 0.25),
            _Break(words, 0.0),
        ]

    def covering(self, start: int) -> "TextWindow":
        """This window, or the next one if the longest chunk from `start` might leave this one."""
        if self.end == len(self.text):
            return self
        if start >= self.start and self._furthest(start, self.max_tokens) < self.end:
            return self
        return TextWindow(self.tokenizer, self.text, start, self.max_tokens)

    def cut_after(self, start: int, room: int) -> int:
        """Where to end a chunk that begins at `start` and may hold about `room` tokens."""
        limit = self._furthest(start, room)
        if limit == len(self.text):
            return limit
        for kind in self.breaks:
            least = start + int((limit - start) * kind.min_fill)
            last = bisect_right(kind.ends, limit) - 1
            if last >= 0 and kind.ends[last] > max(start, least):
                return kind.ends[last]
        return max(limit, start + 1)

    def _furthest(self, start: int, room: int) -> int:
        """The end of the `room`-th token from `start`."""
        ends = self.token_ends
        last = bisect_right(ends, start) + room - 1
        return ends[last] if last < len(ends) else self.end


class BlankSkipper:
    """Skips blanks of one text. A run of them is read once, however often it is asked about: that
    of a hostile text is as long as the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._run = range(0)  # the run read last
        self._newline = -1  # its last one

    def skip(self, start: int) -> int:
        """Past blank lines, but not into the indentation of the first line with text."""
        if start not in self._run:
            match = BLANK.match(self._text, start)
            assert match is not None, "an empty match always exists"
            self._run = range(start, match.end())
            self._newline = self._text.rfind("\n", start, match.end())
        end = self._run.stop
        if end == len(self._text):
            return end
        return start if self._newline < start else self._newline + 1


def skip_blank(text: str, start: int) -> int:
    """As `BlankSkipper.skip`, once."""
    return BlankSkipper(text).skip(start)


def last_heading(text: str, start: int, end: int) -> str:
    """Of a stretch of the text; empty if it has none."""
    last = ""
    for match in HEADING.finditer(text, start, end):
        last = words_of(match.group())
    return last


def words_of(heading: str) -> str:
    """A line such as `## Drain a node {#drain}` without its marks: that is, `Drain a node`."""
    words = heading.strip().strip("#").strip()
    anchor = max(words.rfind("{#"), words.rfind("{:")) if words.endswith("}") else 0
    return words[:anchor].rstrip() if anchor > 0 else words


def section_title(chunk: "Chunk") -> str:
    """The title line of a chunk, and behind it the heading that its text begins with: chunks of one
    document are told apart by it."""
    body = chunk.text.removeprefix(chunk.title).lstrip("\n")
    own = HEADING.match(body)
    heading = words_of(own.group()) if own else ""
    if not heading or chunk.title.endswith(heading):
        return chunk.title
    return f"{chunk.title}{SECTION}{heading}" if chunk.title else heading
