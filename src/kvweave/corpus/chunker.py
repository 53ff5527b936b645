"""Cuts a text into chunks, counted in the serving model's own tokens.

Each chunk is tokenised by itself, title line in front, and those ids are what later stands in the
prompt. So the limit holds for the ids that count, not for an estimate of them: offsets of a longer
stretch of text propose where to cut (`TextWindow`), the chunk's own tokenisation decides.

    text   |# Drain a node↵↵Cordon first. …|Then evict the pods. …|
    chunks  [start, end) ranges that touch: together they are the text, nothing lost, nothing twice
    prompt  title line + "\\n" + the range without its outer blank lines and trailing white space,
            closed by a blank line, so that chunks laid side by side do not run into each other
"""

import hashlib
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from textwrap import shorten
from typing import TYPE_CHECKING, NamedTuple

from kvweave.errors import ConfigError
from kvweave.types import Chunk, ChunkId, PlacedChunk

if TYPE_CHECKING:
    from kvweave.text.tokenizer import Tokenizer

WINDOW_CHUNKS = 32  # tokenise this many chunks' worth of text at a time: memory stays flat

SECTION = " › "  # between the title of a document and a heading in it
HEADING = re.compile(r"^#{1,6}[ \t]+\S.*$", re.MULTILINE)
PARAGRAPH = re.compile(r"\n(?:[ \t]*\n)+")
SENTENCE = re.compile(r"(?<=[.!?…])[\"'”’)\]]*[ \t]+|(?<=[。！？])|\n")
WORD = re.compile(r"\n|[^\S\n]+")
BLANK = re.compile(r"\s*")
MIN_CHUNK_TOKENS = 32  # below this a title line leaves no room for text
CLOSE = "\n\n"  # ends every chunk: part of its ids, so no separator is ever put between chunks
SUMMARY_CHARS = 160
ENDS, CLOSING = ".!?…。！？", "\"'”’)]"  # of sentences, and what may stand behind that
LIKELY_CHARS = 5  # per token: a text no longer than that is tried as one chunk first


def make_chunk_id(token_ids: Sequence[int]) -> ChunkId:
    """Equal tokens, equal id, on every machine: a hash of the ids as little-endian uint32."""
    return _make_chunk_id(tuple(token_ids))


@lru_cache(maxsize=1024)  # an answer asks for each of its chunks' ids several times
def _make_chunk_id(token_ids: tuple[int, ...]) -> ChunkId:
    data = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return ChunkId(hashlib.blake2b(data, digest_size=16).hexdigest())


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
            following = min(end, BlankSkipper(text).skip(match.end()))
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


@dataclass(frozen=True, slots=True)
class Chunker:
    """Cuts at headings, then paragraphs, sentences, words; inside a word only if it must.

    Holds no state: the same text gives the same chunks, and text behind a cut never changes the
    chunks in front of it (except the last one, which may have been the end of the text).
    """

    tokenizer: "Tokenizer"
    max_tokens: int = 256  # of the whole chunk, title line included

    def __post_init__(self) -> None:
        if self.max_tokens < MIN_CHUNK_TOKENS:
            raise ConfigError(
                f"chunk_tokens must be at least {MIN_CHUNK_TOKENS}, got {self.max_tokens}"
            )

    def cut(
        self, title: str, text: str, before_each: Callable[[], None] = lambda: None
    ) -> Iterator[PlacedChunk]:
        """Chunks of `text` in order. Their ranges touch and cover it; blank text has none.

        `before_each` is called before a piece is looked at, also one that gives no chunk: what it
        raises ends the cutting.
        """
        blanks = BlankSkipper(text)
        window = TextWindow(self.tokenizer, text, 0, self.max_tokens)
        title = self._short_title(title)
        start = blanks.skip(0)
        heading = ""
        begin = 0  # blank lines in front belong to the first chunk
        while start < len(text):
            before_each()
            window = window.covering(start)
            end, chunk = self._take(window, self._title_line(title, heading), title, start)
            following = blanks.skip(end)
            if following == len(text):
                end = following
            if chunk is not None:
                yield PlacedChunk(chunk, begin, end)
                heading = last_heading(text, start, end) or heading
                begin = end
            start = following

    def _take(
        self, window: TextWindow, line: str, title: str, start: int
    ) -> tuple[int, Chunk | None]:
        """The longest good piece from `start` whose own tokens stay within the limit.

        No chunk for a stretch of white space: it joins the range of the next one.
        """
        text = window.text
        if HEADING.match(text, start):  # it brings its own heading
            line = title
        if len(text) - start <= LIKELY_CHARS * self.max_tokens:
            chunk = self._chunk(line, text[start:])
            if chunk is not None and len(chunk.token_ids) <= self.max_tokens:
                return len(text), chunk
        room = self.max_tokens - (len(self._encode(f"{line}\n")) if line else 0) - 1
        end = window.cut_after(start, room)
        while True:
            chunk = self._chunk(line, text[start:end])
            if chunk is None or len(chunk.token_ids) <= self.max_tokens:
                return end, chunk
            # The estimate was too low: tokens at a seam differ, or the tokenizer normalises.
            assert end > start + 1, f"one character takes over {self.max_tokens} tokens"
            room = max(1, room - (len(chunk.token_ids) - self.max_tokens))
            shorter = window.cut_after(start, room)
            end = shorter if shorter < end else start + (end - start) * 15 // 16

    def _chunk(self, line: str, piece: str) -> Chunk | None:
        body = piece.strip("\n").rstrip()
        if not body:
            return None
        whole = f"{line}\n{body}{CLOSE}" if line else f"{body}{CLOSE}"
        ids = self._encode(whole)
        return Chunk(make_chunk_id(ids), line, whole, tuple(ids))

    def _title_line(self, title: str, heading: str) -> str:
        if not heading or heading == title:
            return title
        line = f"{title}{SECTION}{heading}" if title else heading
        return line if len(self._encode(line)) <= self.max_tokens // 4 else title

    def _short_title(self, title: str) -> str:
        """One line, at most a quarter of the limit: a title must not crowd out the text."""
        title = " ".join(title.split())
        if len(title.encode(errors="replace")) <= self.max_tokens // 4:
            return title  # no token is shorter than a byte
        _, offsets = self.tokenizer.encode_with_offsets(title)
        if len(offsets) <= self.max_tokens // 4:
            return title
        return title[: offsets[self.max_tokens // 4 - 1][0]].rstrip()

    def _encode(self, text: str) -> list[int]:
        """Ids of text as text. A document that spells out "<|im_end|>" gets no control token.

        Encoded in two pieces, such a word falls apart into ordinary tokens that decode to the
        same characters.
        """
        ids: list[int] = []
        pending = [text]  # the next piece last
        while pending:
            piece = pending.pop()
            more, offsets = self.tokenizer.encode_with_offsets(piece)
            middles = self._inside_controls(piece, more, offsets)
            if not middles:
                ids += more
                continue
            bounds = [0, *middles, len(piece)]
            pending += [piece[start:end] for start, end in pairwise(bounds)][::-1]
        return ids

    def _inside_controls(
        self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
    ) -> list[int]:
        """A place inside each word that became a control token."""
        controls = self.tokenizer.control_ids
        middles: list[int] = []
        for token_id, (start, end) in zip(ids, offsets, strict=True):
            if token_id not in controls:
                continue
            spelled = text[start:end].strip()  # an unknown-word token spells something else
            if len(spelled) > 1 and spelled == self.tokenizer.decode([token_id]).strip():
                middles.append(text.index(spelled, start) + 1)
        return middles


def last_heading(text: str, start: int, end: int) -> str:
    """The last heading in a stretch of the text; empty if it has none."""
    last = ""
    for match in HEADING.finditer(text, start, end):
        last = words_of(match.group())
    return last


def words_of(heading: str) -> str:
    """A line such as `## Drain a node {#drain}` without its marks: that is, `Drain a node`."""
    words = heading.strip().strip("#").strip()
    anchor = max(words.rfind("{#"), words.rfind("{:")) if words.endswith("}") else 0
    return words[:anchor].rstrip() if anchor > 0 else words


def summary_of(text: str) -> str:
    """The first sentences of a chunk's text, which stand for it: SUMMARY_CHARS characters at most,
    cut at a word. The title line is passed over; what else is no sentence is taken where there is
    none."""
    first, _, rest = text.strip().partition("\n")
    if first[-1:] not in ENDS and rest and not rest.lstrip()[:1].islower():
        text = rest
    paragraphs = (" ".join(each.split()) for each in PARAGRAPH.split(HEADING.sub("", text)))
    pieces: list[str] = []
    for words in filter(None, paragraphs):
        bounds = [0, *(match.end() for match in SENTENCE.finditer(words)), len(words)]
        pieces += [words[start:end].strip() for start, end in pairwise(bounds) if start < end]
    sentences = [each for each in pieces if each.rstrip(CLOSING)[-1:] in ENDS] or pieces
    summary = sentences[0] if sentences else ""
    for sentence in sentences[1:]:
        if len(summary) + len(sentence) >= SUMMARY_CHARS:
            break
        summary = f"{summary} {sentence}"
    return shorten(summary, SUMMARY_CHARS, placeholder=" …")


def section_title(chunk: Chunk) -> str:
    """The title line of a chunk, and behind it the heading that its text begins with: chunks of one
    document are told apart by it."""
    body = chunk.text.removeprefix(chunk.title).lstrip("\n")
    own = HEADING.match(body)
    heading = words_of(own.group()) if own else ""
    if not heading or chunk.title.endswith(heading):
        return chunk.title
    return f"{chunk.title}{SECTION}{heading}" if chunk.title else heading
