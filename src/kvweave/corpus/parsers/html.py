"""HTML to text with headings, list items and table rows kept apart. Scripts and menus go."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.corpus.parsers.base import ParsedRecord, ParseLimits, check_length, decode, lone_record
from kvweave.errors import CorpusError

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

DROPPED = frozenset(
    """script style noscript template svg math head nav iframe object canvas audio video select
    button""".split()  # noqa: SIM905 – words read better as words
)
BLOCKS = frozenset(
    """p div section article main header footer aside ul ol dl dt dd table blockquote figure
    figcaption form fieldset pre hr address details summary h1 h2 h3 h4 h5 h6""".split()  # noqa: SIM905 – words read better as words
)
LINES = frozenset(("br", "tr"))
CLOSE_PRE = "</pre>"
# Elements that need no closing tag: an open one says nothing about depth.
UNCLOSED = frozenset(
    """area base br col embed hr img input link meta source track wbr p li dt dd tr td th thead
    tbody tfoot option optgroup colgroup html head body""".split()  # noqa: SIM905 – as above
)
TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)")
MAX_DEPTH = 4096  # the tree builder's time grows with the square of the depth
CHARSET = re.compile(rb"charset=[\"']?([\w-]+)", re.IGNORECASE)
SPACES = re.compile(r"[^\S\n]+")
BLANK_LINES = re.compile(r"\n\s*\n")


def parse_html(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    from selectolax.lexbor import LexborHTMLParser

    page = _decode(data)
    _check_depth(page)
    tree = LexborHTMLParser(page)
    if tree.body is None:
        raise CorpusError("no text in it")
    heading = tree.css_first("h1")
    title = (tree.css_first("title") or heading) if heading is None else heading
    name = " ".join(title.text().split()) if title is not None else ""
    return lone_record(name or path.stem, check_length(_text(tree.body), limits))


def _check_depth(page: str) -> None:
    depth = 0
    for match in TAG.finditer(page):
        closing, name = match.groups()
        if name.lower() not in UNCLOSED:
            depth = max(0, depth - 1) if closing else depth + 1
            if depth > MAX_DEPTH:
                raise CorpusError(f"elements nested over {MAX_DEPTH:,} deep")


def _decode(data: bytes) -> str:
    """By byte order mark, as UTF-8, or as the page itself declares."""
    try:
        return decode(data)
    except CorpusError:
        declared = CHARSET.search(data[:2048])
        if declared is None or b"\0" in data:
            raise
        try:
            return data.decode(declared.group(1).decode("ascii"))
        except (LookupError, UnicodeError) as error:
            raise CorpusError(f"not in the encoding that the page declares ({error})") from error


def _text(body: "LexborNode") -> str:
    text = "".join(_pieces(body))
    lines = (line.rstrip().removesuffix(" |") for line in text.split("\n"))
    # a single space in front comes from white space between elements, not from the author
    lines = (line[1:] if line[:1] == " " and line[1:2] != " " else line for line in lines)
    return BLANK_LINES.sub("\n\n", "\n".join(lines)).strip()


def _pieces(body: "LexborNode") -> Iterator[str]:
    """Depth first with a stack of our own: hostile pages nest deeper than Python recurses."""
    stack: list[LexborNode | str] = [body]
    pre_depth = 0
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            pre_depth -= node == CLOSE_PRE
            yield "\n\n" if node == CLOSE_PRE else node
            continue
        tag = node.tag or ""
        if tag == "-text":
            text = node.text_content or ""
            yield text if pre_depth else SPACES.sub(" ", text.replace("\n", " "))
        elif tag not in DROPPED and not tag.startswith(("-", "_")):
            pre_depth += tag == "pre"
            yield _opening(tag)
            stack.append(_closing(tag))
            stack.extend(reversed(list(node.iter(include_text=True))))


def _opening(tag: str) -> str:
    if len(tag) == 2 and tag[0] == "h" and tag[1] in "123456":
        return f"\n\n{'#' * int(tag[1])} "
    if tag == "li":
        return "\n- "
    return "\n\n" if tag in BLOCKS else ""


def _closing(tag: str) -> str:
    if tag == "pre":
        return CLOSE_PRE
    if tag in BLOCKS:
        return "\n\n"
    if tag in LINES:
        return "\n"
    return " | " if tag in ("td", "th") else ""
