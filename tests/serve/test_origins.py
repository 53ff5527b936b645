"""No web page uses the server behind its user's back."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from kvweave.app.weave import Weave
from kvweave.errors import ConfigError
from kvweave.serve.access.api_keys import parse_keys
from kvweave.serve.access.origins import OriginRules
from worlds.serving import KbServer, serving, user

NOTE = {"title": "x", "text": "An uploaded note."}


def test_a_page_of_another_origin_cannot_upload(kb_server: KbServer) -> None:
    place = f"{kb_server.url}/v1/kb/origins/documents"
    files = {"file": ("x.txt", b"written by a web page")}
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        reply = httpx.post(place, files=files, headers=headers, timeout=60)
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in reply.headers
    assert "origins" not in kb_server.libraries.folders.names("")


def test_its_own_page_can(kb_server: KbServer) -> None:
    place = f"{kb_server.url}/v1/kb/own-page/documents"
    headers = {"Origin": kb_server.url, "Sec-Fetch-Site": "same-origin"}
    assert httpx.post(place, json=NOTE, headers=headers, timeout=60).status_code == 200
    host = kb_server.url.removeprefix("http://")
    behind_tls = {"Origin": f"https://{host}"}
    assert httpx.post(place, json=NOTE, headers=behind_tls, timeout=60).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8321", "127.0.0.1.evil.example"])
def test_a_name_that_may_be_somebody_elses_is_not_answered_to(url: str, host: str) -> None:
    for path in ("/v1/models", "/healthz", "/"):
        reply = httpx.get(f"{url}{path}", headers={"Host": host}, timeout=30)
        assert reply.status_code == 403
        assert "does not go by the name" in reply.json()["error"]["message"]


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8321", "kvweave", "10.0.0.7"])
def test_addresses_and_local_names_are(url: str, host: str) -> None:
    assert httpx.get(f"{url}/v1/models", headers={"Host": host}, timeout=30).status_code == 200


@contextmanager
def with_rules(weave: Weave, rules: OriginRules, key: str | None = None) -> Iterator[str]:
    keys = None if key is None else parse_keys([key])
    with serving(weave, origins=rules, keys=keys) as address:
        yield address


def test_what_is_configured_is_let_in(weave: Weave) -> None:
    rules = OriginRules(("*.example.org",), ("https://app.example.org/",))
    with with_rules(weave, rules) as url:
        host = {"Host": "kb.example.org"}
        assert httpx.get(f"{url}/v1/models", headers=host, timeout=30).status_code == 200
        assert httpx.get(f"{url}/v1/models", headers={"Host": "a.test"}).status_code == 403
        page = {"Origin": "https://app.example.org"}
        body = {"messages": user("hi"), "max_tokens": 1}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers=page, timeout=60)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://app.example.org"
        for method, path in (("POST", "chat/completions"), ("PATCH", "kb/notes")):
            asked = {"Access-Control-Request-Method": method, **page}
            ahead = httpx.options(f"{url}/v1/{path}", headers=asked, timeout=30)
            assert ahead.status_code == 200
        foreign = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        refused = httpx.options(f"{url}/v1/chat/completions", headers=foreign, timeout=30)
        assert refused.status_code in (400, 403)
        assert "access-control-allow-origin" not in refused.headers


def test_with_a_key_the_key_decides(weave: Weave) -> None:
    with with_rules(weave, OriginRules(), "sk-secret-1") as url:
        headers = {"Host": "kb.example.org", "Origin": "app://editor"}
        assert httpx.get(f"{url}/v1/models", headers=headers, timeout=30).status_code == 401
        headers["Authorization"] = "Bearer sk-secret-1"
        assert httpx.get(f"{url}/v1/models", headers=headers, timeout=30).status_code == 200


@pytest.mark.parametrize(
    ("hosts", "origins", "words"),
    [
        ((), ("app.example.org",), "'app.example.org' is no origin"),
        ((), ("https://a.example/path",), "is no origin"),
        (("https://a.example",), (), "is no name"),
    ],
)
def test_what_cannot_be_is_refused(
    hosts: tuple[str, ...], origins: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        OriginRules(hosts, origins)
