"""EPUB books: the chapters in the order of reading, each as the page of HTML that it is."""

import io
import posixpath
import zipfile
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

from kvweave.corpus.parsers.base import (
    ParsedRecord,
    ParseLimits,
    check_length,
    check_unpacked,
    lone_record,
    reading,
)
from kvweave.corpus.parsers.html import parse_html
from kvweave.errors import CorpusError

CONTAINER = "META-INF/container.xml"
PAGES = ("application/xhtml+xml", "text/html")


def parse_book(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    check_unpacked(data, limits, "EPUB")
    with reading("EPUB"), zipfile.ZipFile(io.BytesIO(data)) as book:
        folder, package = _package(book)
        texts = [
            _page(book, name, limits)
            for name in _reading_order(folder, package)
            if name in book.namelist()
        ]
        named = next((e.text for e in package.iter() if _tag(e) == "title" and e.text), "")
    text = "\n\n".join(filter(None, texts))
    return lone_record(named.strip() or path.stem, check_length(text, limits))


def _package(book: zipfile.ZipFile) -> tuple[str, ElementTree.Element]:
    """The folder of the file that lists what is in the book, and that file."""
    container = _xml(book.read(CONTAINER))
    where = next((e.get("full-path") for e in container.iter() if _tag(e) == "rootfile"), None)
    if where is None:
        raise CorpusError("broken EPUB (its container names no package)")
    return posixpath.dirname(where), _xml(book.read(where))


def _reading_order(folder: str, package: ElementTree.Element) -> list[str]:
    pages = {
        e.get("id"): posixpath.normpath(posixpath.join(folder, unquote(e.get("href") or "")))
        for e in package.iter()
        if _tag(e) == "item" and e.get("media-type") in PAGES
    }
    order = [e.get("idref") for e in package.iter() if _tag(e) == "itemref"]
    return [pages[name] for name in order if name in pages]


def _page(book: zipfile.ZipFile, name: str, limits: ParseLimits) -> str:
    try:
        (record,) = parse_html(Path(name), book.read(name), limits)
    except CorpusError as error:
        if str(error) == "no text in it":  # a cover
            return ""
        raise
    return record.text


def _xml(data: bytes) -> ElementTree.Element:
    if b"<!ENTITY" in data:
        raise CorpusError("broken EPUB (it declares entities, which none needs)")
    return ElementTree.fromstring(data)  # noqa: S314 - without entities, in a process that is limited


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]
