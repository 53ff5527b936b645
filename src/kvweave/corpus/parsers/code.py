"""Source code: the text as it is, named after its file, with a blank line in front of definitions
that have none, so that cuts fall between them."""

import re
from pathlib import Path

from kvweave.corpus.parsers.base import ParsedRecord, ParseLimits, decode, lone_record

# what begins a part of a program at the left margin, in the languages of ENDINGS
BEGINS = re.compile(
    r"(?:export |default |pub(?:\([^)]*\))? |public |private |protected |static |abstract |final |"
    r"async |unsafe )*"
    r"(?:def|class|func|function|fn|impl|trait|interface|struct|enum|type|module|namespace|package|"
    r"sub|create)\b"
)


def parse(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
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
