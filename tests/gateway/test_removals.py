"""What is deleted at the gateway goes from the engines behind it, now or when they are back."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvweave.app.library.library_kv import Retries
from kvweave.app.library.stored_kv import KVPlaces
from kvweave.corpus.chunker import make_chunk_id
from kvweave.gateway.library import EngineMemory
from worlds.gateways import FaultyUpstream, GatewayWorld, gateway_over
from worlds.serving import KbServer, user
from worlds.tiny_corpus import make_text

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 2, "explain": True, "reuse": "prefix"}
NOTES = [{"title": f"n{number}", "text": make_text(40, 100 + number)} for number in range(2)]


@pytest.fixture
def fronted(
    engine: KbServer,
    chat_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[GatewayWorld, FaultyUpstream]]:
    """An engine behind a front that can refuse, and a gateway that soon tries again."""
    monkeypatch.setattr("kvweave.gateway.library.Retries", partial(Retries, first_s=0.1))
    only = FaultyUpstream(engine.url)
    with gateway_over([only.url], tmp_path, tokenizer=chat_model_folder) as world:
        yield world, only
    only.close()


def upload(world: GatewayWorld, name: str) -> list[str]:
    where = f"{world.url}/v1/kb/{name}/documents"
    for note in NOTES:
        assert httpx.post(where, json=note, timeout=60).status_code == 200
    return [document["id"] for document in httpx.get(where, timeout=60).json()["data"]]


def delete(world: GatewayWorld, name: str, document: str) -> None:
    where = f"{world.url}/v1/kb/{name}/documents/{document}"
    assert httpx.delete(where, timeout=60).status_code == 200


def exact_tokens(world: GatewayWorld, name: str) -> int:
    """Tokens of a prompt with all chunks that the engine had exactly."""
    body = {"messages": user("What is it?"), "kb": name, "k": 2, **GREEDY}
    reply = httpx.post(f"{world.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["explain"]["chunks"]) == 2
    return int(reply.json()["explain"]["tokens"]["exact"])


def wait_until(is_so: Callable[[], object], timeout_s: float = 30) -> None:
    until_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until_s, "it did not become so"
        time.sleep(0.05)


def owed(world: GatewayWorld, root: Path, name: str) -> bool:
    engines = [EngineMemory(each, "") for each in world.gateway.fleet.replicas]
    return KVPlaces(root / name / "kv").is_owing(engines)


def test_what_is_deleted_is_found_on_no_engine(
    fronted: tuple[GatewayWorld, FaultyUpstream],
) -> None:
    world, _ = fronted
    ids = upload(world, "gone")
    first = exact_tokens(world, "gone")
    again = exact_tokens(world, "gone")
    assert again > first + 40, "its tree has the chunks by now"
    for document in ids:
        delete(world, "gone", document)
    upload(world, "gone")  # the same texts
    assert exact_tokens(world, "gone") < again - 40, "it had forgotten them"


def test_an_engine_that_cannot_be_told_is_told_later(
    fronted: tuple[GatewayWorld, FaultyUpstream], tmp_path: Path
) -> None:
    world, only = fronted
    ids = upload(world, "late")
    exact_tokens(world, "late")
    again = exact_tokens(world, "late")
    only.fault = "status"
    for document in ids:
        delete(world, "late", document)  # the documents are gone whatever an engine says
    assert owed(world, tmp_path, "late")
    only.fault = None
    wait_until(lambda: not owed(world, tmp_path, "late"))
    upload(world, "late")
    assert exact_tokens(world, "late") < again - 40


def test_what_an_engine_was_not_told_is_told_by_the_next_gateway(
    engine: KbServer,
    chat_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only = FaultyUpstream(engine.url)
    with gateway_over([only.url], tmp_path, tokenizer=chat_model_folder) as world:
        ids = upload(world, "next")
        exact_tokens(world, "next")
        only.fault = "status"
        delete(world, "next", ids[0])
        assert owed(world, tmp_path, "next")
    only.fault = None
    monkeypatch.setattr("kvweave.gateway.library.Retries", partial(Retries, first_s=0.1))
    with gateway_over([only.url], tmp_path, tokenizer=chat_model_folder) as world:
        where = f"{world.url}/v1/kb/next/documents"
        assert len(httpx.get(where, timeout=60).json()["data"]) == 1  # opens it
        wait_until(lambda: not owed(world, tmp_path, "next"))
    only.close()


def test_tenants_forget_for_themselves_alone(engine: KbServer) -> None:
    """Straight to the engine, as a gateway speaks to it."""
    ids = engine.weave.runtime.tokenizer.encode_text(make_text(60, 7))

    def send(tenant: str, **more: Any) -> dict[str, Any]:
        prompt = [1, 2, 3, *ids, 4, 5]
        said = {"chunks": [[3, 3 + len(ids)]], "tenant": tenant, "reuse": "prefix", **more}
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        body["kv_transfer_params"] = {"kvweave": said}
        reply = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return dict(reply.json()["kv_transfer_params"]["kvweave"])

    for tenant in ("one", "two"):
        send(tenant)
        assert send(tenant)["exact"] >= len(ids)
    told = send("one", chunks=[], forget=[make_chunk_id(ids)])
    assert told["forgotten"] == 1
    assert send("two")["exact"] >= len(ids), "another's are its own"
    assert send("one")["exact"] < len(ids)
