"""Two servers over HTTP that share a Valkey tier alone: what one encodes, the other serves."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import redis

from kvweave.app.libraries.libraries import Libraries, LibrariesConfig
from kvweave.app.library.library_kv import KVOptions
from kvweave.config import StoreSettings
from worlds.serving import make_weave, serving, user
from worlds.tiny_corpus import WordEmbedder

NOTES = [
    {"title": "Drain", "text": "To drain a node, cordon it first."},
    {"title": "Quota", "text": "A quota limits the pods of a node."},
]


@contextmanager
def server(model: Path, root: Path, store: StoreSettings) -> Iterator[httpx.Client]:
    with make_weave(model) as weave:
        config = LibrariesConfig(
            root=root, embedder="words", kv=KVOptions("isolated", store=store), host_bytes=1 << 26
        )
        libraries = Libraries(weave, config, open_embedder=lambda name: WordEmbedder())
        try:
            with (
                serving(weave, libraries=libraries) as url,
                httpx.Client(base_url=f"{url}/v1", timeout=60) as client,
            ):
                yield client
        finally:
            libraries.close()


def upload(client: httpx.Client) -> None:
    for note in NOTES:
        assert client.post("/kb/k/documents?wait_for_kv=true", json=note).json()["new_chunks"] == 1


def encoded(client: httpx.Client) -> list[str]:
    """Lines of the counter, which has none until something was encoded."""
    address = str(client.base_url).replace("/v1", "/metrics")
    lines = httpx.get(address.rstrip("/"), timeout=60).text.splitlines()
    return [line for line in lines if line.startswith("kvweave_kv_chunks_encoded_total")]


@pytest.mark.parametrize("disk_bytes", [None, 0])
def test_the_second_servers_first_fused_answer_comes_from_the_shared_tier(
    chat_model_folder: Path, tmp_path: Path, redis_url: str, disk_bytes: int | None
) -> None:
    store = replace(StoreSettings(redis_url=redis_url), disk_bytes=disk_bytes)
    with redis.Redis.from_url(redis_url) as valkey:
        valkey.flushdb()
        with server(chat_model_folder, tmp_path / "a", store) as client:
            upload(client)
            assert encoded(client)[-1].endswith(" 2.0")
        with server(chat_model_folder, tmp_path / "b", store) as client:
            upload(client)
            body = {"messages": user("How do I drain a node?"), "kb": "k", "k": 2}
            asked = {**body, "reuse": "reuse", "explain": True, "max_tokens": 2}
            explain = client.post("/chat/completions", json=asked).json()["explain"]
            assert [chunk["tier"] for chunk in explain["chunks"]] == ["redis", "redis"]
            assert explain["tokens"]["reused"] > 0
            assert encoded(client) == []
            assert valkey.dbsize() == 2
            document = client.get("/kb/k/documents").json()["data"][0]
            assert client.delete(f"/kb/k/documents/{document['id']}").status_code == 200
            assert valkey.dbsize() == 1
            valkey.flushdb()
