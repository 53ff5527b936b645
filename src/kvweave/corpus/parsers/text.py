"""Plain text and Markdown. The text stays as it is; only the title is looked for."""

import re
from pathlib import Path

from kvweave.corpus.parsers.base import ParsedRecord, ParseLimits, decode, lone_record

FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)\r?\n---[ \t]*\r?\n", re.DOTALL)
FRONT_TITLE = re.compile(r"^title:[ \t]*(.+?)[ \t]*$", re.MULTILINE)
FIRST_HEADING = re.compile(r"^#[ \t]+(.+?)[ \t#]*$", re.MULTILINE)


def parse(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    text = decode(data)
    title = path.stem
    if path.suffix.lower() in (".md", ".markdown"):
        front = FRONT_MATTER.match(text)
        if front:
            text = text[front.end() :]
        named = FRONT_TITLE.search(front.group(1)) if front else None
        named = named or FIRST_HEADING.search(text)
        if named:
            title = named.group(1).strip("\"'")
    return lone_record(title, text)
