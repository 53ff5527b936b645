"""Conversations of the web page: kept with keys alone, per tenant, bounded, on the disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.libraries import saved_conversations
from kvweave.app.libraries.saved_conversations import MOST_BYTES, SavedConversations
from kvweave.app.weave import Weave
from kvweave.serve.access.api_keys import parse_keys
from kvweave.serve.routes.context import PageConfig
from worlds.serving import serving
from worlds.syncs import is_synced_behind, watched_disk

KEYS = parse_keys(["sk-nobody", "sk-acme-1:acme", "sk-acme-2:acme", "sk-other:other"])
TALK = {
    "title": "Pods",
    "messages": [
        {"role": "user", "content": "What is a pod?"},
        {"role": "assistant", "content": "A <b>pod</b> 🐋.", "meta": {"id": "chatcmpl-1"}},
    ],
    "updated": 1.5,
    "meta": {"kb": "cluster"},
}


@pytest.fixture
def guarded(weave: Weave, tmp_path: Path) -> Iterator[str]:
    with serving(weave, keys=KEYS, page=PageConfig(64, tmp_path / "talks")) as address:
        yield address


def call(method: str, url: str, name: str = "", key: str = "sk-acme-1", **how: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    path = f"{url}/v1/conversations{f'/{name}' if name else ''}"
    return httpx.request(method, path, headers=headers, timeout=60, **how)


def test_a_conversation_is_kept_listed_changed_and_deleted(guarded: str) -> None:
    assert call("GET", guarded).json()["data"] == []
    assert call("PUT", guarded, "c1", json=TALK).status_code == 200
    found = call("GET", guarded, "c1").json()
    assert (found["id"], found["title"], found["updated"]) == ("c1", "Pods", 1.5)
    assert found["messages"][1]["content"] == "A <b>pod</b> 🐋."
    assert found["messages"][1]["meta"] == {"id": "chatcmpl-1"}
    assert found["meta"] == {"kb": "cluster"}
    later = {**TALK, "title": "Nodes", "updated": 9.0, "messages": TALK["messages"][:1]}
    assert call("PUT", guarded, "c2", json=later).status_code == 200
    listed = call("GET", guarded).json()["data"]
    assert [(line["id"], line["title"], line["messages"]) for line in listed] == [
        ("c2", "Nodes", 1),
        ("c1", "Pods", 2),
    ]
    assert call("DELETE", guarded, "c1").json()["deleted"] is True
    assert call("GET", guarded, "c1").status_code == 404
    assert call("DELETE", guarded, "c1").status_code == 404


def test_tenants_are_apart_and_keys_of_one_share(guarded: str) -> None:
    assert call("PUT", guarded, "c1", json=TALK).status_code == 200
    assert call("GET", guarded, "c1", "sk-acme-2").status_code == 200
    for key in ("sk-other", "sk-nobody"):
        assert call("GET", guarded, "c1", key).status_code == 404
        assert call("DELETE", guarded, "c1", key).status_code == 404
        assert call("GET", guarded, key=key).json()["data"] == []
    for method in ("GET", "PUT", "DELETE"):
        assert call(method, guarded, "c1", "", json=TALK).status_code == 401


def test_without_keys_the_browser_keeps_them(weave: Weave, tmp_path: Path) -> None:
    with serving(weave, page=PageConfig(64, tmp_path)) as url:
        for method, name in (("GET", ""), ("GET", "c1"), ("PUT", "c1"), ("DELETE", "c1")):
            reply = call(method, url, name, "", json=TALK if method == "PUT" else None)
            assert reply.status_code == 404
            assert "browser" in reply.json()["error"]["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        (".hidden", TALK, "cannot name a conversation"),
        ("a.b", TALK, "cannot name a conversation"),
        ("x" * 65, TALK, "cannot name a conversation"),
        ("c1", {**TALK, "messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        ("c1", {**TALK, "updated": -1}, "'updated'"),
        ("c1", {**TALK, "title": "x" * 301}, "'title'"),
        ("c1", {**TALK, "more": 1}, "'more' is not supported"),
        ("c1", {"title": "x"}, "'messages' is missing"),
    ],
)
def test_what_cannot_be_kept_is_a_400(guarded: str, name: str, body: Any, says: str) -> None:
    reply = call("PUT", guarded, name, json=body)
    assert reply.status_code == 400, reply.text
    assert says in reply.json()["error"]["message"]


def test_one_that_is_too_long_is_refused_and_too_many_push_the_oldest_out(
    guarded: str, tmp_path: Path
) -> None:
    long = {**TALK, "messages": [{"role": "user", "content": "x" * (MOST_BYTES + 1)}]}
    reply = call("PUT", guarded, "c1", json=long)
    assert reply.status_code == 400
    assert "1 MiB" in reply.json()["error"]["message"]
    saved = SavedConversations(tmp_path / "few", most=3)
    for number in range(5):
        saved.put("acme", f"c{number}", {**TALK, "updated": float(number)})
    assert [line.id for line in saved.all("acme")] == ["c4", "c3", "c2"]


def test_a_damaged_file_is_not_listed_and_they_outlive_the_server(
    weave: Weave, tmp_path: Path
) -> None:
    page = PageConfig(64, tmp_path)
    with serving(weave, keys=KEYS, page=page) as url:
        assert call("PUT", url, "c1", json=TALK).status_code == 200
    (tmp_path / "@acme" / "c2.json").write_text("{")
    (tmp_path / "@acme" / "c3.json").write_text("[]")
    with serving(weave, keys=KEYS, page=page) as url:
        assert [line["id"] for line in call("GET", url).json()["data"]] == ["c1"]
        assert call("GET", url, "c2").status_code == 404


def test_a_list_reads_no_file_that_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, read = SavedConversations(tmp_path), list[str]()
    real = saved_conversations._read

    def note(path: Path) -> dict[str, Any] | None:
        read.append(path.stem)
        return real(path)

    monkeypatch.setattr(saved_conversations, "_read", note)
    for name in ("a", "b"):
        kept.put("t", name, {"title": name, "messages": [], "updated": 1.0})
    assert [line.title for line in kept.all("t")] == ["a", "b"]
    kept.all("t")
    assert sorted(read) == ["a", "b"]
    kept.put("t", "b", {"title": "new", "messages": [{}], "updated": 2.0})
    assert [(line.title, line.num_messages) for line in kept.all("t")] == [("new", 1), ("a", 0)]
    assert sorted(read) == ["a", "b", "b"]
    kept.delete("t", "a")
    assert [line.title for line in kept.all("t")] == ["new"]


def test_what_is_kept_and_what_is_deleted_outlive_a_power_cut(tmp_path: Path) -> None:
    saved = SavedConversations(tmp_path / "talks")
    with watched_disk() as events:
        saved.put("acme", "c1", TALK)
    for folder in (tmp_path, tmp_path / "talks", tmp_path / "talks" / "@acme"):
        assert ("sync", folder) in events, folder
    with watched_disk() as events:
        saved.delete("acme", "c1")
    gone = ("unlink", tmp_path / "talks" / "@acme" / "c1.json")
    assert is_synced_behind(events, gone, tmp_path / "talks" / "@acme", ("sync", tmp_path))
