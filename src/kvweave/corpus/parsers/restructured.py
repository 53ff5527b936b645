"""reStructuredText: the text as it is, its section titles as headings, so that cuts fall there."""

from pathlib import Path

from kvweave.corpus.parsers.base import ParsedRecord, ParseLimits, decode, lone_record

RULES = frozenset("=-`:.'\"~^_*+#<>")  # what titles are underlined with
MOST_LEVELS = 6


def parse(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    lines, levels, title = decode(data).splitlines(), dict[str, int](), ""
    made: list[str] = []
    at = 0
    while at < len(lines):
        over = _rule(lines[at]) if at + 2 < len(lines) else None
        # a title stands between two rules, or above one
        named = lines[at + 1] if over is not None and _rule(lines[at + 2]) == over else None
        if named is not None and named.strip() and _rule(named) is None:
            style, step = f"{over}{over}", 3
        else:
            named, style, step = lines[at], "", 2
            under = _rule(lines[at + 1]) if at + 1 < len(lines) else None
            is_long = under is not None and len(lines[at + 1].rstrip()) >= len(named.rstrip())
            if not (under and is_long and named.strip() and not named[:1].isspace()):
                made.append(lines[at])
                at += 1
                continue
            if _rule(named) is not None:
                made.append(lines[at])
                at += 1
                continue
            style = under
        level = levels.setdefault(style, min(len(levels) + 1, MOST_LEVELS))
        title = title or named.strip()
        made.append(f"{'#' * level} {named.strip()}")
        at += step
    return lone_record(title or path.stem, "\n".join(made))


def _rule(line: str) -> str | None:
    """The sign that a line repeats, if it does nothing else."""
    line = line.rstrip()
    return line[0] if len(line) >= 2 and line[0] in RULES and set(line) == {line[0]} else None
