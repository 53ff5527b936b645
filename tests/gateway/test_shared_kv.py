"""Replicas behind a gateway share chunk KV: nothing is set but the address of a Valkey."""

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest
import redis

from kvweave.app.library.library_kv import Retries
from kvweave.model.load import load_decoder
from kvweave.text.prompt import split_template
from kvweave.text.tokenizer import Tokenizer
from worlds.auto import World
from worlds.gateways import SYSTEM, FaultyUpstream, GatewayWorld, engine_process, gateway_over
from worlds.servers import refusing
from worlds.serving import user
from worlds.tiny_corpus import make_text
from worlds.tiny_models import make_chat_model_folder

NOTES = [{"title": f"n{number}", "text": make_text(60, 500 + number)} for number in range(4)]


@dataclass
class SharingFleet:
    """A gateway in front of two processes of `kvweave serve`, each of which can be kept away."""

    world: GatewayWorld
    fronts: list[FaultyUpstream]
    engines: list[str]
    valkey: "redis.Redis[bytes]"

    def use_only(self, number: int) -> None:
        """Let the gateway find one replica alone."""
        for place, front in enumerate(self.fronts):
            front.fault = None if place == number else "unready"
        self._wait_for_health([place == number for place in range(len(self.fronts))])

    def use_all(self) -> None:
        for front in self.fronts:
            front.fault = None
        self._wait_for_health([True] * len(self.fronts))

    def _wait_for_health(self, wanted: list[bool]) -> None:
        replicas = self.world.gateway.fleet.replicas
        wait_until(lambda: [replica.is_open for replica in replicas] == wanted)

    def ask(self, kb: str, first: int = 0, last: int = len(NOTES)) -> dict[str, Any]:
        """What became of the prompt of a question about some notes, by default in all else."""
        body = {"messages": user("What is it?"), "kb": kb, "k": last - first + 1, "max_tokens": 2}
        body |= {"filter": {"n": {"gte": first, "lte": last}}, "explain": True}
        reply = httpx.post(f"{self.world.url}/v1/chat/completions", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        return dict(reply.json()["explain"]["upstream"]["told"])

    def ask_often(self, kb: str) -> list[dict[str, Any]]:
        """Ask overlapping questions: each note is in two prompts or more, in other company."""
        return [self.ask(kb, *window) for window in ((0, 1), (1, 2), (2, 3), (0, 2), (1, 3))]

    def upload(self, kb: str) -> list[str]:
        where = f"{self.world.url}/v1/kb/{kb}/documents"
        for number, note in enumerate(NOTES):
            body = {**note, "metadata": {"n": number}}
            assert httpx.post(where, json=body, timeout=60).status_code == 200
        return [document["id"] for document in httpx.get(where, timeout=60).json()["data"]]

    def progress(self, kb: str) -> dict[str, Any]:
        return dict(httpx.get(f"{self.world.url}/v1/kb/{kb}", timeout=60).json()["kv"])

    def delete(self, kb: str, document: str) -> None:
        where = f"{self.world.url}/v1/kb/{kb}/documents/{document}"
        assert httpx.delete(where, timeout=60).status_code == 200

    def count(self, engine: int, name: str) -> float:
        """A counter of one replica, all its labels together."""
        lines = httpx.get(f"{self.engines[engine]}/metrics", timeout=60).text.splitlines()
        found = [line for line in lines if re.match(rf"kvweave_{name}(\{{|\s)", line)]
        return sum(float(line.rpartition(" ")[2]) for line in found)


def wait_until(is_so: Any, timeout_s: float = 60) -> None:
    until_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until_s, "it did not become so"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[SharingFleet]:
    """Both replicas know the made-up prices of a machine on which computing is slow."""
    root = tmp_path_factory.mktemp("sharing")
    model = make_chat_model_folder(root, max_position_embeddings=4096)
    tokenizer = Tokenizer(model)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("KVWEAVE_HOME", str(root / "home"))
        world = World(root / "none", load_decoder(model, device="cpu"), tokenizer)
        preamble = split_template(tokenizer, SYSTEM)[0]
        world.calibrate(("reuse", 0.0, 0.0), preamble=preamble, num_fillers=4)
        world.set_machine()
        valkey = stack.enter_context(redis.Redis.from_url(redis_url))
        valkey.flushdb()
        engines, fronts = [], []
        for name in "ab":
            shutil.copytree(root / "home", root / name)
            _, url = stack.enter_context(
                engine_process(model, root / name, KVWEAVE_STORE_REDIS_URL=redis_url)
            )
            engines.append(url)
            fronts.append(FaultyUpstream(url))
            stack.callback(fronts[-1].close)
        urls = [front.url for front in fronts]
        gateway = stack.enter_context(gateway_over(urls, root / "kbs", tokenizer=model))
        yield SharingFleet(gateway, fronts, engines, valkey)
        valkey.flushdb()


def test_what_one_replica_made_the_other_fuses_until_it_is_deleted(fleet: SharingFleet) -> None:
    ids = fleet.upload("shared")
    assert fleet.progress("shared")["state"] == "on_demand"
    fleet.use_only(0)
    fleet.ask_often("shared")
    wait_until(lambda: fleet.valkey.dbsize() >= len(NOTES))
    made = fleet.count(0, "kv_chunks_encoded_total")
    assert made > 0

    fleet.use_only(1)
    told = fleet.ask("shared", 0, 2)
    assert told["reused"] > 0, told
    assert fleet.count(1, "kv_tier_bytes") > 0
    assert fleet.count(1, "kv_chunks_encoded_total") == 0, "all of it was there"
    progress = fleet.progress("shared")
    assert 0 < progress["chunks_done"] <= progress["chunks_total"]

    fleet.use_all()
    for document in ids:
        fleet.delete("shared", document)
    assert fleet.valkey.dbsize() == 0
    assert [fleet.count(number, "kv_tier_bytes") for number in (0, 1)] == [0, 0]
    fleet.upload("shared")  # the same texts: what comes back is computed first
    fleet.use_only(1)
    told = fleet.ask("shared")
    assert (told["way"], told["reused"]) == ("exact", 0)
    assert fleet.progress("shared")["chunks_done"] == 0


def test_a_shared_tier_that_misses_a_removal_is_told_later(
    fleet: SharingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.gateway.library.Retries", partial(Retries, first_s=0.1))
    fleet.use_all()
    (first, *_) = fleet.upload("late")
    fleet.use_only(0)
    for _ in range(2):
        fleet.ask("late")
    wait_until(lambda: fleet.valkey.dbsize() >= len(NOTES))
    before = fleet.valkey.dbsize()
    fleet.use_all()
    with refusing(fleet.valkey, "scan", "del", "unlink"):
        fleet.delete("late", first)  # the document is gone whatever a tier says
        assert fleet.valkey.dbsize() == before
    wait_until(lambda: fleet.valkey.dbsize() < before)
