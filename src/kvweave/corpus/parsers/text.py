"""Texts that stay as they are: plain text, Markdown, reStructuredText and source code.

What is added lets cuts fall at headings and between definitions.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvweave.corpus.chunker import words_of
from kvweave.corpus.parsers.base import ParsedRecord, ParseLimits, decode, lone_record

FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)\r?\n---[ \t]*\r?\n", re.DOTALL)
TITLE = "title:"
RULES = frozenset("=-`:.'\"~^_*+#<>")  # what titles of reStructuredText are underlined with
MOST_LEVELS = 6
# what begins a part of a program at the left margin, in the languages of ENDINGS
BEGINS = re.compile(
    r"(?:export |default |pub(?:\([^)]*\))? |public |private |protected |static |abstract |final |"
    r"async |unsafe )*"
    r"(?:def|class|func|function|fn|impl|trait|interface|struct|enum|type|module|namespace|package|"
    r"sub|create)\b"
)


def parse_text(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
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


def parse_code(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    """Name the text after its file, and put a blank line in front of definitions that have none."""
    made: list[str] = []
    for line in decode(data).splitlines():
        is_start = BEGINS.match(line) is not None
        above = made[-1].strip() if made else ""
        # what stands above belongs to it: a comment, a decorator, an attribute
        is_alone = above and not above.startswith(("#", "//", "*", "/*", "--", "@", "[", '"""'))
        if is_start and is_alone:
            made.append("")
        made.append(line)
    return lone_record(path.name, "\n".join(made))


def parse_restructured(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    """Turn section titles into headings, of a level for each style in order of appearance."""
    lines, levels, title = decode(data).splitlines(), dict[str, int](), ""
    made: list[str] = []
    at = 0
    while at < len(lines):
        section = _section_title(lines[at : at + 3])
        if section is None:
            made.append(lines[at])
            at += 1
            continue
        level = levels.setdefault(section.style, min(len(levels) + 1, MOST_LEVELS))
        title = title or section.title
        made.append(f"{'#' * level} {section.title}")
        at += section.num_lines
    return lone_record(title or path.stem, "\n".join(made))


class _SectionTitle(NamedTuple):
    """A title of reStructuredText: between two rules, or above one."""

    title: str
    style: str  # the signs of its rules
    num_lines: int


def _section_title(lines: Sequence[str]) -> _SectionTitle | None:
    """The section title that these lines begin with."""
    rules = [_rule(line) for line in lines]
    is_between = len(lines) == 3 and rules[0] is not None and rules[1:] == [None, rules[0]]
    if is_between and lines[1].strip():
        return _SectionTitle(lines[1].strip(), f"{rules[0]}{rules[0]}", 3)
    if len(lines) < 2 or rules[0] is not None or rules[1] is None:
        return None
    title, rule = lines[0].rstrip(), lines[1].rstrip()
    if not title or title[0].isspace() or len(rule) < len(title):
        return None
    return _SectionTitle(title, rules[1], 2)


def _rule(line: str) -> str | None:
    """The sign that a line repeats, if it does nothing else."""
    line = line.rstrip()
    return line[0] if len(line) >= 2 and line[0] in RULES and set(line) == {line[0]} else None
