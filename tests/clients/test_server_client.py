"""Our own client against a real server: chats, knowledge bases, and what goes wrong in one line."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.app.weave import Weave
from kvweave.clients.server import ServerClient, ServerFailed
from kvweave.errors import ConfigError
from kvweave.serve.access.api_keys import parse_keys
from worlds.serving import make_libraries, make_weave, serving, user

KEY = "sk-of-the-client"


@pytest.fixture(scope="module")
def weave(chat_model_folder: Path) -> Weave:
    return make_weave(chat_model_folder)


@pytest.fixture(scope="module")
def client(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerClient]:
    libraries = make_libraries(weave, tmp_path_factory.mktemp("kbs"))
    with serving(weave, libraries=libraries, keys=parse_keys([KEY])) as url:
        yield ServerClient(f"{url}/v1/", KEY)
    libraries.close()


def test_a_knowledge_base_from_upload_to_answer(client: ServerClient) -> None:
    text = "A zorb is a small round tool. It is 14 cm wide."
    client.upload_text("life", "Zorbs", text, key="z", metadata={"kind": "tool"})
    report = client.upload_file("life", "a/b/quota.md", b"# Quotas\nOf pods.", wait_for_kv=True)
    assert report["added"] == 1
    assert {d["title"]: d["metadata"] for d in client.documents("life")} == {
        "Zorbs": {"kind": "tool"},
        "Quotas": {},
    }
    (hit,) = client.search("life", "how wide", 3, filter={"kind": "tool"})
    assert hit["title"] == "Zorbs"
    reply = client.chat(user("How wide?"), kb="life", max_tokens=3, temperature=0)
    assert {source["title"] for source in reply["sources"]} == {"Zorbs", "Quotas"}
    events = list(client.chat_events(user("How wide?"), kb="life", max_tokens=3, temperature=0))
    said = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
    assert said == reply["choices"][0]["message"]["content"]
    whole = client.document("life", hit["document"])
    assert client.chunk("life", whole["pieces"][0]["id"])["text"].strip().endswith(text)
    assert client.delete_document("life", hit["document"])["chunks"] == 1
    assert client.kb("life")["documents"] == 1
    client.delete_kb("life")
    assert "life" not in [kb["name"] for kb in client.kbs()]


def test_lists_come_page_by_page(client: ServerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.clients.server.PAGE", 2)
    for name in ("p1", "p2", "p3", "p4", "p5"):
        client.upload_text(name, name, f"The page of {name}.")
    names = [kb["name"] for kb in client.kbs() if kb["name"] != "life"]
    assert names == ["p1", "p2", "p3", "p4", "p5"]
    for number in range(4):
        client.upload_text("p1", f"t{number}", f"Number {number}.")
    assert len({d["id"] for d in client.documents("p1")}) == 5


def test_the_key_may_be_in_the_environment(
    client: ServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerFailed, match="API key is missing") as seen:
        ServerClient(client.url).models()
    assert (seen.value.status, seen.value.code) == (401, "invalid_api_key")
    monkeypatch.setenv("KVWEAVE_API_KEY", KEY)
    assert ServerClient(client.url).models()[0]["id"] == "tiny"


def test_what_goes_wrong_is_one_line(client: ServerClient) -> None:
    with pytest.raises(ServerFailed, match="no knowledge base 'nowhere' here"):
        client.search("nowhere", "q")
    with pytest.raises(ServerFailed, match="'temperature' must be a valid number"):
        list(client.chat_events(user("q"), temperature="hot"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ServerFailed, match=r"does not answer: .*; is it running"):
        ServerClient(f"http://127.0.0.1:{port}").models()
    with pytest.raises(ConfigError, match="is no address of a server"):
        ServerClient("ftp://somewhere")


def test_an_address_needs_no_scheme_and_no_path() -> None:
    for url in ("127.0.0.1:8321", "http://127.0.0.1:8321/", "http://127.0.0.1:8321/v1"):
        assert ServerClient(url).url == "http://127.0.0.1:8321"
