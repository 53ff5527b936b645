"""Pages of the web for `kvweave ingest`: a list of addresses, or a sitemap.

From the command line alone: a server that fetched what a request names could be sent anywhere.
"""

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree

from kvweave import __version__
from kvweave.errors import CorpusError
from kvweave.ingest.report import Skipped
from kvweave.ingest.sources import FileBytes

TIMEOUT_S = 30.0
MOST_PAGES = 10_000  # of one sitemap
MOST_SITEMAPS = 100  # that one names
SITEMAP_BYTES = 50 << 20
ENDINGS = {
    "text/html": ".html",
    "application/xhtml+xml": ".html",
    "text/plain": ".txt",
    "text/markdown": ".md",
    "application/pdf": ".pdf",
    "application/json": ".json",
}


class WebReply(NamedTuple):
    data: bytes
    kind: str  # its media type


def read_addresses(file: Path) -> list[str]:
    """One address a line; blank lines and those that begin with # do not count."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot read the addresses in {file}: {error}") from error
    found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for each in found:
        _check(each)
    return found


def read_sitemap(url: str) -> list[str]:
    """The pages that a sitemap names, and those of sitemaps that it names; of its own host alone,
    each once."""
    host, pages = urlsplit(_check(url)).netloc, dict[str, None]()
    waiting, seen = [url], set[str]()
    while waiting:
        at = waiting.pop(0)
        if at in seen:
            continue
        seen.add(at)
        if len(seen) > MOST_SITEMAPS:
            raise CorpusError(f"{url} names more than {MOST_SITEMAPS} sitemaps; name one of them")
        root = _xml(fetch(at, SITEMAP_BYTES).data, at)
        is_index = root.tag.endswith("sitemapindex")
        for element in root.iter():
            where = (element.text or "").strip()
            if not element.tag.endswith("}loc") and element.tag != "loc":
                continue
            if urlsplit(where).netloc != host:
                continue  # a sitemap speaks for its own host
            if is_index:
                waiting.append(where)
            else:
                pages[where] = None
        if len(pages) > MOST_PAGES:
            raise CorpusError(f"{url} names more than {MOST_PAGES:,} pages; name a part of it")
    return list(pages)


def fetch_pages(addresses: list[str], most_bytes: int) -> Iterator[FileBytes | Skipped]:
    """Each page, as a file whose document has its address as metadata; or why there is none."""
    for address in addresses:
        try:
            reply = fetch(address, most_bytes)
        except CorpusError as error:
            yield Skipped(address, str(error))
            continue
        ending = ENDINGS.get(reply.kind)
        if ending is None:
            yield Skipped(address, f"its type {reply.kind!r} has no parser")
            continue
        suffix = PurePosixPath(urlsplit(address).path).suffix.lower()
        name = address if suffix == ending else f"{address}{ending}"
        yield FileBytes(name, reply.data, {"url": address[:1024]})


def fetch(url: str, most_bytes: int) -> WebReply:
    """What stands at an address. Raises CorpusError."""
    request = urllib.request.Request(  # noqa: S310 - `_check` allows http and https alone
        _check(url), headers={"User-Agent": f"kvweave/{__version__}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:  # noqa: S310
            _check(reply.url)  # where it was led to
            data = reply.read(most_bytes + 1)
            kind = reply.headers.get_content_type()
    except (OSError, ValueError, urllib.error.URLError) as error:
        told: object = getattr(error, "reason", None) or error
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is a reply as well, and has a socket
            told = error
        reason = " ".join(str(told).split())
        raise CorpusError(f"cannot fetch {url}: {reason[:200]}") from error
    if len(data) > most_bytes:
        raise CorpusError(f"{url} is larger than {most_bytes / 2**20:,.0f} MiB")
    return WebReply(data, kind)


def _check(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CorpusError(f"{url!r} is no address of a page; write https://HOST/PATH")
    return url


def _xml(data: bytes, url: str) -> ElementTree.Element:
    try:
        if b"<!ENTITY" in data:
            raise ValueError("it declares entities")
        return ElementTree.fromstring(data)  # noqa: S314 - without entities
    except (ElementTree.ParseError, ValueError) as error:
        raise CorpusError(f"{url} is no sitemap: {error}") from error
