"""GET / and /ui/…: the files of the web page, and the headers that keep it harmless."""

import gzip
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from kvweave.app.weave import Weave
from kvweave.serve.access.api_keys import parse_keys
from kvweave.serve.http import build_http
from kvweave.serve.routes.context import make_context
from kvweave.serve.ui.page import FOLDER, SITE, read_assets, ui_routes
from worlds.serving import serving

STRICT = ("default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'")


def test_the_page_is_at_the_root_and_its_headers_are_strict(url: str) -> None:
    reply = httpx.get(f"{url}/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.text == (FOLDER / "index.html").read_text()
    policy = reply.headers["content-security-policy"].split("; ")
    assert set(STRICT) <= set(policy)
    assert not [part for part in policy if "unsafe" in part or "http" in part]
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert reply.headers["x-frame-options"] == "DENY"


def test_every_file_of_the_folder_is_served_with_its_type(url: str) -> None:
    assets = read_assets()
    assert "index.html" in assets
    for name, asset in assets.items():
        reply = httpx.get(f"{url}/ui/{name}")
        assert reply.status_code == 200, name
        assert reply.content == (FOLDER / name).read_bytes(), name
        assert reply.headers["content-type"] == asset.media_type, name
        assert "content-security-policy" in reply.headers, name


def test_what_a_browser_has_already_is_a_304(url: str) -> None:
    etag = httpx.get(f"{url}/").headers["etag"]
    for known in (etag, f'"other", W/{etag}', "*"):
        again = httpx.get(f"{url}/", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b""), known
        assert again.headers["etag"] == etag
    assert httpx.get(f"{url}/", headers={"If-None-Match": '"other"'}).status_code == 200


def test_a_large_file_is_compressed_for_those_who_take_it(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("export const a = 1;\n" * 100)
    (tmp_path / "small.js").write_text("1;")
    (tmp_path / "font.woff2").write_bytes(bytes(1000))
    (tmp_path / "secret.py").write_text("x = 1\n" * 1000)
    assets = read_assets(tmp_path)
    assert set(assets) == {"a.js", "small.js", "font.woff2"}, "no other types"
    packed = assets["a.js"].packed
    assert packed is not None
    assert len(packed) < 200
    assert gzip.decompress(packed) == assets["a.js"].body
    assert assets["small.js"].packed is None
    assert assets["font.woff2"].packed is None
    assert read_assets(tmp_path)["a.js"] == assets["a.js"], "the same at every start"


@pytest.mark.parametrize(
    ("offered", "got"),
    [("gzip", "gzip"), ("br, gzip;q=0.5", "gzip"), ("gzip;q=0", None), ("identity", None)],
)
def test_encoding_follows_what_the_browser_offers(
    tmp_path: Path, offered: str, got: str | None
) -> None:
    text = "export const a = 1;\n" * 100
    (tmp_path / "a.js").write_text(text)
    http = FastAPI()
    http.include_router(ui_routes(tmp_path))
    reply = TestClient(http).get("/ui/a.js", headers={"Accept-Encoding": offered})
    assert reply.headers.get("content-encoding") == got
    assert reply.text == text
    assert "Accept-Encoding" in reply.headers["vary"]


def test_the_documentation_is_served_where_it_was_built(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "assets").mkdir(parents=True)
    (site / "index.html").write_text("<h1>kvweave</h1>")
    (site / "assets" / "a.js").write_text("1;")
    http = FastAPI(docs_url=None)
    http.include_router(ui_routes(tmp_path / "page", site))
    client = TestClient(http)
    front = client.get("/docs")  # follows to /docs/, from where the links of its pages start
    assert front.url.path == "/docs/"
    assert front.text == "<h1>kvweave</h1>"
    policy = front.headers["content-security-policy"].split("; ")
    assert "script-src 'self' 'unsafe-inline'" in policy
    assert "connect-src 'self'" in policy
    assert not [part for part in policy if "http" in part]
    assert client.get("/docs/assets/a.js").headers["content-type"].startswith("text/javascript")


def test_where_the_documentation_was_not_built_a_line_says_how(weave: Weave) -> None:
    http = build_http(make_context(weave))
    client = TestClient(http)
    assert "POST /v1/chat/completions" in client.get("/docs/api").text
    if not SITE.is_dir():
        missing = client.get("/docs/")
        assert missing.status_code == 404
        assert "`make site`" in missing.json()["error"]["message"]


def test_a_head_request_has_the_headers_alone(url: str) -> None:
    whole, head = httpx.get(f"{url}/ui/index.html"), httpx.head(f"{url}/ui/index.html")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]


@pytest.mark.parametrize(
    "path",
    ["ui/", "ui/none.js", "ui/%2e%2e/routes.py", "ui/..%2fassets.py", "ui//etc/passwd"],
)
def test_nothing_but_those_files_is_served(url: str, path: str) -> None:
    reply = httpx.get(httpx.URL(f"{url}/{path}"))
    assert reply.status_code == 404
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_the_page_needs_no_key(weave: Weave) -> None:
    with serving(weave, keys=parse_keys(["sk-nobody"])) as guarded:
        assert httpx.get(f"{guarded}/").status_code == 200
        assert httpx.get(f"{guarded}/ui/index.html").status_code == 200
        assert httpx.get(f"{guarded}/v1/models").status_code == 401
