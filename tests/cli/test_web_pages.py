"""Pages of the web by a list of addresses or a sitemap, from a real server of files."""

import gc
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvweave.cli.web_pages import fetch_pages, read_addresses, read_sitemap
from kvweave.errors import CorpusError
from kvweave.ingest.report import Skipped
from kvweave.ingest.sources import FileBytes

INDEX = (
    "<sitemapindex xmlns='http://s'><sitemap><loc>{url}/pages.xml</loc></sitemap></sitemapindex>"
)
PAGES = """<urlset xmlns='http://s'><url><loc>{url}/a.html</loc></url>
<url><loc>{url}/gone.html</loc></url><url><loc>http://elsewhere.example/x.html</loc></url>
<url><loc>{url}/a.html</loc></url></urlset>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    handler = partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        (tmp_path / "a.html").write_text("<h1>Zorbs</h1><p>14 cm wide.</p>")
        (tmp_path / "b.txt").write_text("plain words")
        (tmp_path / "c.png").write_bytes(b"\x89PNG")
        (tmp_path / "sitemap.xml").write_text(INDEX.format(url=address))
        (tmp_path / "pages.xml").write_text(PAGES.format(url=address))
        yield address
        server.shutdown()


def test_a_sitemap_names_pages_of_its_own_host_each_once(url: str) -> None:
    assert read_sitemap(f"{url}/sitemap.xml") == [f"{url}/a.html", f"{url}/gone.html"]
    with pytest.raises(CorpusError, match="is no sitemap"):
        read_sitemap(f"{url}/a.html".replace("a.html", "b.txt"))


def test_pages_become_files_and_what_cannot_be_had_is_told(url: str) -> None:
    wanted = [f"{url}/{name}" for name in ("a.html", "b.txt", "c.png", "gone.html")]
    html, text, image, gone = fetch_pages(wanted, 1 << 20)
    assert isinstance(html, FileBytes)
    assert (html.name, dict(html.metadata)) == (wanted[0], {"url": wanted[0]})
    assert isinstance(text, FileBytes)
    assert text.data == b"plain words"
    assert image == Skipped(wanted[2], "its type 'image/png' has no parser")
    assert isinstance(gone, Skipped)
    assert "404" in gone.reason
    (large,) = fetch_pages(wanted[:1], 5)
    assert isinstance(large, Skipped)
    assert "larger than" in large.reason


def test_a_page_that_is_gone_leaves_no_socket_behind(url: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        (gone,) = fetch_pages([f"{url}/gone.html"], 1 << 20)
        gc.collect()
    assert isinstance(gone, Skipped)
    assert [str(each.message) for each in seen if each.category is ResourceWarning] == []


def test_a_list_of_addresses_is_judged_before_any_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("# mine\nhttps://a.example/x\n\nhttp://b.example/y\n")
    assert read_addresses(tmp_path / "list") == ["https://a.example/x", "http://b.example/y"]
    (tmp_path / "list").write_text("file:///etc/passwd\n")
    with pytest.raises(CorpusError, match="is no address of a page"):
        read_addresses(tmp_path / "list")
    with pytest.raises(CorpusError, match="cannot read the addresses"):
        read_addresses(tmp_path / "none")
