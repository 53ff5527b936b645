"""API keys, tenants, and what one tenant sees of another: nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from kvweave.app.weave import Weave
from kvweave.errors import ConfigError
from kvweave.serve.access.api_keys import digest, parse_keys, read_keys
from worlds.serving import make_libraries, serving, user

KEYS = parse_keys(["sk-nobody", "sk-acme-1:acme", "sk-acme-2:acme", "sk-other:other"])
NOTE = {"title": "Drain", "text": "To drain a node, cordon it first."}


@pytest.fixture(scope="module")
def guarded(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    libraries = make_libraries(weave, tmp_path_factory.mktemp("guarded"))
    with serving(weave, libraries=libraries, keys=KEYS) as address:
        yield address
    libraries.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        {"Authorization": "Bearer"},
        {"Authorization": "sk-nobody"},
        bearer("sk-nobody:acme"),
    ],
)
def test_without_a_key_it_is_a_401_of_the_usual_shape(
    guarded: str, headers: dict[str, str]
) -> None:
    for path in ("models", "kb", "nothing"):
        reply = httpx.get(f"{guarded}/v1/{path}", headers=headers)
        assert reply.status_code == 401
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "invalid_api_key"
        assert reply.headers["x-request-id"]


def test_the_client_sends_its_key(guarded: str) -> None:
    with OpenAI(base_url=f"{guarded}/v1", api_key="sk-nobody") as client:
        reply = client.chat.completions.create(model="tiny", messages=user("hi"), max_tokens=2)
        assert reply.choices
    with (
        OpenAI(base_url=f"{guarded}/v1", api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="missing or wrong"),
    ):
        client.models.list()


def test_those_who_watch_need_no_key(guarded: str) -> None:
    for path in ("healthz", "readyz", "metrics"):
        assert httpx.get(f"{guarded}/{path}").status_code == 200


def test_a_tenant_sees_its_own_knowledge_bases_alone(guarded: str) -> None:
    url = f"{guarded}/v1/kb"
    made = httpx.post(
        f"{url}/notes/documents?wait_for_kv=true",
        json=NOTE,
        headers=bearer("sk-acme-1"),
        timeout=60,
    )
    assert made.status_code == 200

    def names(key: str) -> list[str]:
        return [kb["name"] for kb in httpx.get(url, headers=bearer(key)).json()["data"]]

    assert names("sk-acme-2") == ["notes"], "keys of one tenant share"
    assert names("sk-other") == names("sk-nobody") == []
    body = {"messages": user("drain?"), "max_tokens": 2, "kb": "notes", "reuse": "reuse"}
    chat = f"{guarded}/v1/chat/completions"
    assert httpx.post(chat, json=body, headers=bearer("sk-acme-2")).status_code == 200
    assert httpx.post(chat, json=body, headers=bearer("sk-other")).status_code == 404
    assert httpx.get(f"{url}/notes/documents", headers=bearer("sk-nobody")).status_code == 404


def test_the_same_text_under_two_tenants_is_computed_for_each(guarded: str) -> None:
    """One engine computes for both; neither its knowledge tree nor a store tells them apart less
    than two servers would."""
    note = {"title": "Secret", "text": "The merger with Umbra closes on the ninth of May."}
    for key in ("sk-acme-1", "sk-other"):
        url = f"{guarded}/v1/kb/same/documents?wait_for_kv=true"
        assert httpx.post(url, json=note, headers=bearer(key), timeout=60).status_code == 200
    other = {"title": "Else", "text": "Whales sing."}
    url = f"{guarded}/v1/kb/else/documents?wait_for_kv=true"
    assert httpx.post(url, json=other, headers=bearer("sk-other"), timeout=60).status_code == 200

    def explained(key: str, kb: str, reuse: str, documents: object = None) -> dict[str, Any]:
        body = {"messages": user("merger?"), "max_tokens": 2, "kb": kb, "reuse": reuse}
        body |= {"explain": True, "documents": documents}
        url = f"{guarded}/v1/chat/completions"
        reply = httpx.post(url, json=body, headers=bearer(key), timeout=60)
        assert reply.status_code == 200, reply.text
        return dict(reply.json()["explain"])

    def exact(key: str) -> int:
        return int(explained(key, "same", "prefix")["tokens"]["exact"])

    first, mine = exact("sk-acme-1"), exact("sk-acme-2")
    assert mine - first > len(note["text"].split()), "the tree has the tenant's own chunk"
    assert exact("sk-other") < mine - len(note["text"].split()), "and no other's"
    assert exact("sk-other") == mine

    def whys(key: str, kb: str) -> list[str | None]:
        return [chunk["why"] for chunk in explained(key, kb, "reuse", [note])["chunks"]]

    assert whys("sk-acme-1", "same") == whys("sk-other", "same") == [None]
    assert whys("sk-other", "else") == [None], "the tenant's own, from the tree"
    fresh = explained("sk-other", "else", "reuse", [note, {**note, "title": "New"}])["chunks"]
    assert [chunk["why"] for chunk in fresh] == [None, "absent"], "stored by others, and elsewhere"


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nsk-first-1\nsk-second:acme\n")
    keys = read_keys(file, {"KVWEAVE_API_KEYS": "sk-third-3:other, sk-fourth"})
    assert keys == {
        digest("sk-first-1"): "",
        digest("sk-second"): "acme",
        digest("sk-third-3"): "other",
        digest("sk-fourth"): "",
    }
    assert read_keys(None, {}) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("short", "API key 1 is shorter than 8"),
        ("sk-long-enough:a/b", "'a/b' cannot name a tenant"),
        ("sk-long-enough\nsk-long-enough:x", "API key 2 is there twice"),
        ("# nothing", "has no API key"),
    ],
)
def test_a_key_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_keys(file, {})
    with pytest.raises(ConfigError, match="cannot read the API keys"):
        read_keys(tmp_path / "missing", {})


def test_what_one_tenant_deletes_stays_in_anothers_conversation(guarded: str) -> None:
    """Both have the same text, so the same chunk id. It went out of the other's history, and its
    count of tokens told."""
    acme, other = bearer("sk-acme-1"), bearer("sk-other")
    place = f"{guarded}/v1/kb/twins/documents"
    for headers in (acme, other):
        assert httpx.post(place, json=NOTE, headers=headers, timeout=60).status_code == 200

    def asked(history: list[dict[str, str]], question: str) -> dict[str, Any]:
        body = {
            "messages": [*history, *user(question)],
            "kb": "twins",
            "k": 1,
            "conversation_id": "c",
            "max_tokens": 1,
            "temperature": 0,
            "explain": True,
            "reuse": "prefix",
        }
        url = f"{guarded}/v1/chat/completions"
        reply = httpx.post(url, json=body, headers=other, timeout=60)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    first = asked([], "How do I drain?")["choices"][0]["message"]["content"]
    history = [*user("How do I drain?"), {"role": "assistant", "content": first}]
    asked(history, "And now?")
    before = asked(history, "And now?")  # all of it is cached by now
    (document,) = httpx.get(place, headers=acme, timeout=60).json()["data"]
    gone = httpx.delete(f"{place}/{document['id']}", headers=acme, timeout=60)
    assert gone.status_code == 200
    after = asked(history, "And now?")
    assert after["usage"]["total_tokens"] == before["usage"]["total_tokens"]
    assert after["explain"]["tokens"] == before["explain"]["tokens"], "nor is it computed again"
    assert httpx.get(place, headers=acme, timeout=60).json()["data"] == []


def test_the_metrics_name_no_tenant_to_a_stranger(guarded: str) -> None:
    place = f"{guarded}/v1/kb/secret-plans/documents"
    upload = httpx.post(place, json=NOTE, headers=bearer("sk-acme-1"), timeout=60)
    assert upload.status_code == 200
    for headers in ({}, bearer("sk-wrong-key"), bearer("sk-other")):
        page = httpx.get(f"{guarded}/metrics", headers=headers, timeout=30).text
        assert "acme" not in page
        assert "secret-plans" not in page
        assert "kvweave_kv_pinned" in page
        assert page.count("\nkvweave_kv_chunks_done") <= 1, "added up"
    operator = httpx.get(f"{guarded}/metrics", headers=bearer("sk-nobody"), timeout=30).text
    assert 'tenant="acme"' in operator


def test_the_page_of_the_api_loads_nothing_from_elsewhere(guarded: str) -> None:
    page = httpx.get(f"{guarded}/docs/api", timeout=30)
    assert page.status_code == 200
    assert "POST /v1/chat/completions" in page.text
    assert "<script" not in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.get(f"{guarded}/redoc", timeout=30).status_code == 404
