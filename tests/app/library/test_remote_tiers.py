"""Chunk KV that machines share, on a real Valkey and an S3-compatible server: found, removed, lost.

Two knowledge bases in folders of their own stand for two machines; what they share is the tier.
"""

import json
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import redis

from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.library.kv_sync import remove_with_kv
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.library.store_tiers import remote_tiers
from kvweave.app.library.stored_kv import KVPlaces
from kvweave.app.weave import Answer, Sampling, Weave
from kvweave.config import StoreSettings
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.kv.format.keys import make_chunk_key
from kvweave.kv.format.objects import pack_chunk
from kvweave.kv.lookup import Residency
from kvweave.kv.provenance import BEHIND, CHUNK, find_tagged, pack_ids
from kvweave.kv.tiers import Tier, open_tier
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig
from kvweave.kv.tiers.disk import DiskTier
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.reasons import Reason
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import ChunkId
from worlds.faulty import FaultyTierConfig
from worlds.kv import make_layers
from worlds.servers import running_redis
from worlds.syncs import is_synced_behind, watched_disk
from worlds.tiny_corpus import WordEmbedder
from worlds.weaves import plain_weave

Over = Callable[..., AbstractContextManager[Weave]]
DRAIN = ("Drain", "To drain a node, cordon it first.")
QUOTA = ("Quota", "A quota limits the pods of a namespace.")
GREEDY = Sampling(max_tokens=2)


@pytest.fixture(scope="module")
def decoder(chat_model_folder: Path) -> Decoder:
    return load_decoder(chat_model_folder, device="cpu")


@pytest.fixture
def over(chat_model_folder: Path, decoder: Decoder, tmp_path: Path) -> Over:
    """Opens the knowledge base of a machine, with a model and an engine of its own."""

    @contextmanager
    def over(machine: str, store: StoreSettings, encoding: str = "isolated") -> Iterator[Weave]:
        with (
            plain_weave(decoder, Tokenizer(chat_model_folder)) as whole,
            whole.over(
                tmp_path / machine,
                KVOptions(encoding, system=whole.system, store=store),
                AnswerSettings(whole.system),
                open_embedder=lambda name: WordEmbedder(),
            ) as weave,
        ):
            yield weave

    return over


@pytest.fixture
def on_redis(redis_url: str) -> Iterator[StoreSettings]:
    """A server that no other test writes to meanwhile."""
    client = redis.Redis.from_url(redis_url)
    client.flushdb()
    yield StoreSettings(host_bytes=1 << 24, redis_url=redis_url)
    client.flushdb()
    client.close()


@pytest.fixture(params=["redis", "s3"])
def shared(request: pytest.FixtureRequest) -> StoreSettings:
    if request.param == "redis":
        return request.getfixturevalue("on_redis")  # type: ignore[no-any-return]
    return StoreSettings(
        host_bytes=1 << 24,
        s3_url=f"s3://chunks/{uuid.uuid4().hex}/kv",
        s3_endpoint=request.getfixturevalue("s3_endpoint"),
        s3_region="us-east-1",
    )


@contextmanager
def remote(store: StoreSettings) -> Iterator[Tier]:
    """The shared tier, as anybody sees it."""
    (cfg,) = remote_tiers(store)
    tier = open_tier(cfg)
    try:
        yield tier
    finally:
        tier.close()


def num_shared(store: StoreSettings) -> int:
    with remote(store) as tier:
        return len(list(tier.scan()))


def fill(weave: Weave, *documents: tuple[str, str]) -> None:
    weave.ingest(*(documents or (DRAIN, QUOTA)), chunk_kv=True)
    assert weave.library.store.flush()


def ask(weave: Weave, question: str = "How do I drain?") -> Answer:
    return weave.ask(question, k=1, reuse="reuse", sampling=GREEDY)


def document_of(weave: Weave, title: str) -> str:
    (found,) = [d.id for d in weave.library.kb.documents() if d.title == title]
    return found


def owed(folder: Path) -> set[str]:
    places = json.loads((folder / "kv" / "places.json").read_text())
    return {name for each in places["remotes"].values() for name in each.get("gone", ())}


def test_a_second_machine_answers_from_the_shared_tier_without_encoding_anything(
    over: Over, shared: StoreSettings
) -> None:
    with over("a", shared) as weave:
        fill(weave)
        assert weave.library.encoder.saves().saved == 2
        assert weave.library.store.metrics.value("kv_chunks_encoded_total") == 2
        wanted = ask(weave).text
    name = "redis" if shared.redis_url else "s3"
    with over("b", shared) as weave:
        fill(weave)
        assert weave.library.encoder.saves() == (0, 0, ())
        answer = ask(weave)
        assert answer.explain is not None
        assert [(c.tier, c.why) for c in answer.explain.chunks] == [(name, None)]
        assert answer.explain.loaded_bytes.keys() == {name}
        assert answer.text == wanted
        metrics = weave.library.store.metrics
        assert metrics.value("kv_loads_total", tier=name) == 1
        assert metrics.value("kv_saves_total") == 0
        assert metrics.value("kv_chunks_encoded_total") == 0
        assert [c.tier for c in ask(weave).explain.chunks] == ["host"]  # type: ignore[union-attr]


def test_a_removal_reaches_what_only_the_shared_tier_has(over: Over, shared: StoreSettings) -> None:
    with over("a", shared) as weave:
        fill(weave)
    assert num_shared(shared) == 2
    with over("b", shared) as weave:
        fill(weave)  # encodes nothing, and loads nothing
        weave.remove(document_of(weave, "Drain"))
        assert weave.library.kv.sync().is_settled
    assert num_shared(shared) == 1
    with over("c", shared) as weave:
        fill(weave)
        assert weave.library.encoder.saves().saved == 1, "only what went"


@dataclass(frozen=True)
class SharedFolderConfig:
    """A tier of somebody's own: a folder that machines share."""

    kind: ClassVar[str] = "shared"
    capacity_bytes: ClassVar[None] = None
    root: Path

    @property
    def place(self) -> str:
        return f"shared://{self.root}"

    def open(self) -> "SharedFolder":
        return SharedFolder(self)


class SharedFolder(DiskTier):
    """What such a config opens."""

    remote: ClassVar[bool] = True

    def __init__(self, cfg: SharedFolderConfig) -> None:
        super().__init__(DiskTierConfig(cfg.root))
        self.name, self.place = "shared", cfg.place


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_removal_reaches_a_tier_of_a_kind_that_nobody_knew(
    chat_model_folder: Path,
    decoder: Decoder,
    tmp_path: Path,
    is_faulty: bool,
) -> None:
    shared = SharedFolderConfig(tmp_path / "shared")
    far = FaultyTierConfig(shared) if is_faulty else shared
    options = KVOptions("isolated", tiers=(HostTierConfig(1 << 24), far))
    for machine in ("a", "b"):  # the second one encodes nothing, and loads nothing
        with (
            plain_weave(decoder, Tokenizer(chat_model_folder)) as whole,
            whole.over(
                tmp_path / machine,
                replace(options, system=whole.system),
                AnswerSettings(whole.system),
                open_embedder=lambda name: WordEmbedder(),
            ) as weave,
        ):
            fill(weave)
            assert len(list(SharedFolder(shared).scan())) == 2
            if machine == "b":
                weave.remove(document_of(weave, "Drain"))
                assert weave.library.kv.sync().is_settled
    assert len(list(SharedFolder(shared).scan())) == 1


def test_a_removal_takes_what_was_computed_for_other_models_and_tenants(
    over: Over, shared: StoreSettings
) -> None:
    with over("a", shared) as weave:
        fill(weave, DRAIN)
        (hit,) = weave.search("drain", 1)
        ids = hit.chunk.token_ids
        context = replace(weave.library.encoder.context, model="another", tenant_salt="other")
        with remote(shared) as tier:
            tier.write(make_chunk_key(context, ids), [b"x" * 4096])
            tier.write(make_chunk_key(context, [*ids, 1]), [b"x" * 4096])
        weave.remove(document_of(weave, "Drain"))
    assert num_shared(shared) == 1, "of another chunk"


def test_kv_behind_a_removed_neighbour_goes_and_other_kv_of_that_chunk_stays(
    over: Over, on_redis: StoreSettings
) -> None:
    with over("a", on_redis) as weave:
        context = weave.library.encoder.context
        fill(weave)
        hits = {hit.chunk.title: hit.chunk for hit in weave.search("drain quota", 2)}
    user, gone = hits["Quota"], hits["Drain"]
    behind = make_chunk_key(context, user.token_ids, [gone.id])
    extras = {CHUNK: user.id.encode(), BEHIND: pack_ids([gone.id])}
    with remote(on_redis) as tier:
        tier.write(behind, [pack_chunk(behind, make_layers(), "raw", extras).view])
        found = find_tagged(tier, [gone.id], [user.id])
        assert set(found) == {behind, make_chunk_key(context, gone.token_ids)}


@pytest.mark.parametrize("by", ["the same process", "the next start", "the next ingest"])
def test_a_removal_while_the_tier_fails_is_made_up_for_and_nothing_is_served_meanwhile(
    over: Over, redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    admin = redis.Redis.from_url(redis_url)
    admin.flushdb()
    admin.execute_command("ACL", "SETUSER", "kv", "reset", "on", ">s3cr3t", "~*", "+@all")
    url = redis_url.replace("redis://", "redis://kv:s3cr3t@")
    shared = StoreSettings(host_bytes=1 << 24, redis_url=url, disk_bytes=0)
    with over("a", shared) as weave:
        fill(weave)
    with over("a", shared) as weave:
        (hit,) = weave.search("drain", 1)
        key = weave.library.encoder.exact_key(hit.chunk.token_ids)
        admin.execute_command("ACL", "SETUSER", "kv", "-@all")
        assert weave.remove(document_of(weave, "Drain")) == 1  # no tier may stop a removal
        assert owed(tmp_path / "a") == {hit.chunk.id}
        store = weave.library.store
        assert store.metrics.value("kv_tier_errors_total", tier="redis", verb="remove") >= 1
        assert not weave.library.kv.sync().is_settled
        admin.execute_command("ACL", "SETUSER", "kv", "+@all")
        assert admin.dbsize() == 2, "it is still there"
        store = weave.library.store
        store.inventory.by_name["redis"].reads.record_success()  # its rest is over
        with store.acquire([key]) as lease:
            assert lease.tiers == {key: "redis"}
            transfer = store.load(lease)
            assert transfer.wait_layer(0) == {}
            assert transfer.lost == {key: Reason.ABSENT}
        if by == "the same process":
            weave.library.repair()
            assert admin.dbsize() == 1
    with over("a", shared) as weave:
        if by == "the next ingest":
            fill(weave, ("Pod", "A pod runs on a node."))
        assert admin.dbsize() == 1 + (by == "the next ingest")
        assert owed(tmp_path / "a") == set()
        assert weave.library.kv.sync().is_settled
        fill(weave, DRAIN)  # it may come back
        assert ask(weave).explain.chunks[0].tier == "host"  # type: ignore[union-attr]
    assert "s3cr3t" not in caplog.text
    assert "s3cr3t" not in (tmp_path / "a/kv/places.json").read_text()
    admin.flushdb()
    admin.close()


def test_a_removal_by_a_process_that_knows_of_no_shared_tier_is_made_up_for(
    over: Over, on_redis: StoreSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with over("a", on_redis) as weave:
        fill(weave)
        document = document_of(weave, "Drain")
    with KnowledgeBase.open(tmp_path / "a") as kb, caplog.at_level(logging.WARNING):
        remove_with_kv(kb, [kb.find(document)[0].id])
    assert "1 removed chunks may be left in redis://127.0.0.1" in caplog.text
    assert num_shared(on_redis) == 2
    with KnowledgeBase.open(tmp_path / "a") as kb:
        remove_with_kv(kb, [], remote_tiers(on_redis))
    assert num_shared(on_redis) == 1


def test_what_was_sent_just_before_a_removal_elsewhere_is_heard_of_goes_too(
    over: Over, on_redis: StoreSettings, tmp_path: Path
) -> None:
    with over("a", on_redis) as weave:
        fill(weave, DRAIN)
        with KnowledgeBase.open(tmp_path / "a") as kb:
            remove_with_kv(kb, [kb.documents()[0].id])  # and does not reach the server
        assert num_shared(on_redis) == 1
        weave.library.catch_up()
        assert num_shared(on_redis) == 0


def test_damaged_bytes_on_the_server_are_a_miss_and_are_replaced(
    over: Over, on_redis: StoreSettings, redis_url: str
) -> None:
    with over("a", on_redis) as weave:
        fill(weave, DRAIN)
        wanted = ask(weave).text
    with redis.Redis.from_url(redis_url) as client:
        (name,) = client.keys("kvweave:*")
        client.setrange(name, client.strlen(name) - 4096, b"\xff" * 64)
    with over("b", on_redis) as weave:
        fill(weave, DRAIN)
        answer = ask(weave)
        assert answer.explain is not None
        assert answer.explain.chunks[0].why == "corrupt"
        assert answer.completion_tokens == 2
        assert weave.library.store.metrics.value("kv_misses_total", reason="corrupt") == 1
        assert weave.library.store.metrics.value("kv_quarantined_total", tier="redis") == 1
    assert wanted
    with over("c", on_redis) as weave:
        fill(weave, DRAIN)
        assert weave.library.encoder.saves().saved == 1


def test_a_server_that_dies_is_a_miss_with_a_counter(over: Over, tmp_path: Path) -> None:
    with ExitStack() as server, ExitStack() as machine:
        port = server.enter_context(running_redis(tmp_path))
        url = f"redis://127.0.0.1:{port}"
        shared = StoreSettings(host_bytes=1 << 24, disk_bytes=0, redis_url=url)
        with over("a", shared) as weave:
            fill(weave)
        weave = machine.enter_context(over("b", shared))
        fill(weave)
        server.close()
        answer = ask(weave)
        assert answer.completion_tokens == 2
        assert answer.explain is not None
        assert answer.explain.chunks[0].why is not None
        assert weave.library.store.metrics.value("kv_tier_errors_total", tier="redis") > 0


def test_a_disk_folder_has_a_part_for_each_knowledge_base_and_removals_find_it(
    over: Over, tmp_path: Path
) -> None:
    elsewhere = StoreSettings(host_bytes=1 << 24, disk_folder=tmp_path / "fast")
    parts = []
    for machine in ("a", "b"):
        with over(machine, elsewhere) as weave:
            fill(weave)
            parts.append(tmp_path / "fast" / weave.library.kb.catalogue.uid())
        assert not (tmp_path / machine / "kv" / "objects").exists()
    assert sorted(parts) == sorted((tmp_path / "fast").iterdir())
    assert [len(list(part.rglob("*.kv"))) for part in parts] == [2, 2]
    with KnowledgeBase.open(tmp_path / "a") as kb:  # which says nothing of the folder
        remove_with_kv(kb, [kb.documents()[0].id])
    assert [len(list(part.rglob("*.kv"))) for part in parts] == [1, 2]
    with over("b", StoreSettings(host_bytes=1 << 24)) as weave:  # moved back
        weave.remove(document_of(weave, "Drain"))
    assert [len(list(part.rglob("*.kv"))) for part in parts] == [1, 1]


def test_without_a_disk_the_shared_tier_keeps_it(
    over: Over, on_redis: StoreSettings, tmp_path: Path
) -> None:
    shared = replace(on_redis, disk_bytes=0)
    with over("a", shared) as weave:
        fill(weave)
    assert not (tmp_path / "a/kv/objects").exists()
    with over("a", shared) as weave:
        (hit,) = weave.search("drain", 1)
        key = weave.library.encoder.exact_key(hit.chunk.token_ids)
        (peek,) = weave.library.store.peek([key])
        assert (peek.residency, peek.tier) == (Residency.HERE, "redis")


def test_what_a_remote_tier_owes_outlives_a_power_cut(tmp_path: Path) -> None:
    """The catalogue forgets it as soon as it is noted here."""
    places = KVPlaces(tmp_path / "kb" / "kv")
    places.add(None, ["redis://one"])
    with watched_disk() as events:
        places.owe([ChunkId("gone")])
    noted = ("rename", tmp_path / "kb" / "kv" / "places.json")
    assert is_synced_behind(events, noted, tmp_path / "kb" / "kv", ("sync", tmp_path))
