"""Plain text and Markdown. The text stays as it is; only the title is looked for."""

import re
from collections.abc import Iterator
from pathlib import Path

from kvweave.corpus.chunker import words_of
from kvweave.corpus.parsers.base import ParsedRecord, ParseLimits, decode, lone_record

FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)\r?\n---[ \t]*\r?\n", re.DOTALL)
TITLE = "title:"


def parse(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    text = decode(data)
    title = path.stem
    if path.suffix.lower() in (".md", ".markdown"):
        front = FRONT_MATTER.match(text)
        if front:
            text = text[front.end() :]
        named = next(_front_titles(front.group(1)), None) if front else None
        named = named or next(_headings(text), None)
        if named:
            title = named.strip("\"'")
    return lone_record(title, text)


# Line by line: patterns for the same take a time that grows with the square of a run of blanks.


def _front_titles(front: str) -> Iterator[str]:
    for line in front.split("\n"):
        if line.startswith(TITLE) and (title := line.removeprefix(TITLE).strip(" \t")):
            yield title


def _headings(text: str) -> Iterator[str]:
    """Headings of the first level, without what closes them: "# Title ##"."""
    for start in _starts(text, "#"):
        end = text.find("\n", start)
        line = text[start : len(text) if end < 0 else end]
        if line[1:2] in (" ", "\t"):
            heading = line[1:].lstrip(" \t")
            if shown := words_of(heading) or heading[:1]:
                yield shown


def _starts(text: str, mark: str) -> Iterator[int]:
    """Where lines begin with `mark`."""
    if text.startswith(mark):
        yield 0
    at = text.find(f"\n{mark}")
    while at >= 0:
        yield at + 1
        at = text.find(f"\n{mark}", at + 1)
