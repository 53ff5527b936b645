"""Which requests are fused, what vLLM is told of them, and what is ordered from the worker."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvweave.config import StoreSettings
from kvweave.corpus.chunker import make_chunk_id
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.preparation import Preparation
from kvweave.fuse.selectors import strategies
from kvweave.hosts.vllm.auto_reuse import AutoReuse, AutoVerdict, PermittedReuse
from kvweave.hosts.vllm.chunk_maker import as_chunks
from kvweave.hosts.vllm.identity import ModelIdentity, ServedModel, identify
from kvweave.hosts.vllm.orders import StepReport
from kvweave.hosts.vllm.reuse_request import ReuseRequest
from kvweave.hosts.vllm.scheduler_half import SchedulerHalf
from kvweave.hosts.vllm.settings import HostSettings
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.model.load import load_decoder
from kvweave.reasons import Reason
from worlds.lora import make_adapter

BLOCK = 16
PREAMBLE = tuple(range(3, 11))
CHUNKS = tuple(tuple(range(20 + 30 * i, 50 + 30 * i)) for i in range(4))
QUESTION = tuple(range(200, 210))
SPANS = [[8 + 30 * i, 38 + 30 * i] for i in range(4)]
IDS = (*PREAMBLE, *(i for chunk in CHUNKS for i in chunk), *QUESTION)


class MadeRequest:
    """A request as vLLM's scheduler has it."""

    def __init__(self, name: str, ids: Sequence[int], wish: Any = None) -> None:
        self.request_id = name
        self.prompt_token_ids: Sequence[int] | None = list(ids)
        self.kv_transfer_params = None if wish is None else {"kvweave": wish}
        self.block_hashes: list[bytes] = []
        self._block_hasher = hash_blocks
        self.lora_request: Any = None
        self.mm_features: list[Any] = []
        self.prompt_embeds = None
        self.resumable = False
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.extend(self._block_hasher(self))


def hash_blocks(request: MadeRequest) -> list[bytes]:
    ids, made = request.prompt_token_ids or [], list[bytes]()
    for at in range(len(request.block_hashes), len(ids) // BLOCK):
        parent = (request.block_hashes + made)[at - 1] if at else b""
        made.append(hashlib.sha256(parent + repr(ids[at * BLOCK :][:BLOCK]).encode()).digest())
    return made


@pytest.fixture(scope="module")
def identity(chat_model_folder: Path) -> ModelIdentity:
    served = ServedModel(str(chat_model_folder), None, torch.float32, None)
    return identify(served, Preparation.parse("isolated"), "raw")


@pytest.fixture(scope="module")
def encoder(
    identity: ModelIdentity, chat_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChunkEncoder]:
    """kvweave's own, behind the preamble, over a disk."""
    disk = DiskTierConfig(tmp_path_factory.mktemp("kv"), fsync=False)
    decoder = load_decoder(chat_model_folder, device="cpu", dtype="float32")
    with KVStore(StoreConfig(tiers=(HostTierConfig(1 << 24), disk))) as store:
        context = identity.names(PREAMBLE, "").context
        yield ChunkEncoder(decoder, store, context, identity.preparation, identity.texts)


@pytest.fixture
def half(identity: ModelIdentity, encoder: ChunkEncoder) -> Iterator[SchedulerHalf]:
    """Looks into the encoder's disk. `weave` where a request says nothing."""
    yield from open_half(identity, encoder, reuse="weave")


def open_half(
    identity: ModelIdentity, encoder: ChunkEncoder, num_ranks: int = 1, **settings: Any
) -> Iterator[SchedulerHalf]:
    disk = next(slot.tier for slot in encoder.store.inventory.below)
    tiers = (HostTierConfig(1 << 20, pinned=False), DiskTierConfig(Path(disk.place), fsync=False))
    of = HostSettings(StoreSettings(), identity.preparation, **settings)
    made = SchedulerHalf(of, identity, KVStore(StoreConfig(tiers=tiers)), BLOCK, num_ranks)
    yield made
    made.close()


@pytest.fixture
def half_of_two(identity: ModelIdentity, encoder: ChunkEncoder) -> Iterator[SchedulerHalf]:
    """Of two tensor-parallel ranks."""
    yield from open_half(identity, encoder, 2, reuse="weave")


@pytest.fixture
def auto_half(
    identity: ModelIdentity, encoder: ChunkEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SchedulerHalf]:
    """With the default, of a model that was never calibrated."""
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path))
    yield from open_half(identity, encoder)


@pytest.fixture
def stored(encoder: ChunkEncoder) -> None:
    """All chunks."""
    encoder.encode(as_chunks(CHUNKS))
    assert encoder.store.flush()


def wish(**more: Any) -> dict[str, Any]:
    return {"chunks": SPANS, **more}


def test_kvweaves_own_encoder_gives_chunks_the_same_names(
    identity: ModelIdentity, encoder: ChunkEncoder
) -> None:
    names = identity.names(PREAMBLE, "")
    assert names.key(CHUNKS[0]) == encoder.key(CHUNKS[0])
    assert names.exact_key(CHUNKS[0]) == encoder.exact_key(CHUNKS[0])
    assert identity.context.model == encoder.decoder.revision  # type: ignore[attr-defined]


def test_a_request_without_a_wish_is_left_alone(half: SchedulerHalf) -> None:
    request = MadeRequest("a", IDS)
    before = list(request.block_hashes)
    half.plan_request(request)
    assert half.external_tokens(request, 0) == 0
    assert request.block_hashes == before
    assert half.forget_request("a") is None
    assert not half.is_owed


@pytest.mark.usefixtures("stored")
def test_a_stored_prompt_is_filled_up_to_its_last_token(half: SchedulerHalf) -> None:
    request, plain = MadeRequest("a", IDS, wish()), MadeRequest("b", IDS)
    half.plan_request(request)
    assert half.external_tokens(request, 0) == len(IDS) - 1
    half.order_fill(request, range(9), len(IDS) - 1)
    (order,) = half.take_orders([("a", [8])], False).fuse
    assert (order.request_id, order.num_local, order.is_local_ready) == ("a", 0, True)
    assert order.token_ids == IDS
    assert not set(request.block_hashes) & set(plain.block_hashes), "no block may be found as exact"
    half.note_report(StepReport(fused={"a": {"reused": 7}}))
    assert half.take_counts() == {"way fused": 1, "state reused": 7}
    assert half.take_counts() == {}
    assert half.forget_request("a") == {
        "kvweave": {"way": "fused", "stored": 4, "missing": 0, "reused": 7}
    }
    assert not half.is_owed


@pytest.mark.usefixtures("stored")
def test_auto_computes_a_model_exactly_that_was_never_calibrated(auto_half: SchedulerHalf) -> None:
    request, plain = MadeRequest("a", IDS, wish()), MadeRequest("b", IDS)
    auto_half.plan_request(request)
    assert auto_half.external_tokens(request, 0) == 0
    assert request.block_hashes == plain.block_hashes, "it is exact, and may be found as such"
    assert auto_half.take_counts() == {"way exact": 1, f"why {Reason.NO_PROFILE}": 1}
    other = MadeRequest("c", IDS, wish(chunks=[[8, 37], [37, 128]]))
    auto_half.plan_request(other)
    for name in "ac":
        told = auto_half.forget_request(name)
        assert told is not None
        assert (told["kvweave"]["way"], told["kvweave"]["why"]) == ("exact", Reason.NO_PROFILE)
    assert not auto_half.is_owed, "chunk KV that nothing may use is not made"
    named = MadeRequest("d", IDS, wish(reuse="weave"))
    auto_half.plan_request(named)
    assert auto_half.external_tokens(named, 0) == len(IDS) - 1


@pytest.mark.usefixtures("stored")
def test_auto_takes_what_computes_the_fewest_rows_of_what_is_permitted(
    auto_half: SchedulerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(_: AutoReuse, wish: ReuseRequest, ids: tuple[int, ...]) -> AutoVerdict:
        made = [
            PermittedReuse(replace(wish, reuse="weave", ratio=0.3, bound=None), 0.1),
            PermittedReuse(replace(wish, reuse="epic", ratio=0.1, bound=None, close_call=0.2), 0.1),
            PermittedReuse(replace(wish, reuse="reuse", ratio=0.0, bound=None), 0.7),
        ]
        return AutoVerdict(tuple(made), "", {"weave": 0.3, "epic": 0.1, "reuse": 0.0})

    monkeypatch.setattr(AutoReuse, "judge", judge)
    request = MadeRequest("a", IDS, wish())
    auto_half.plan_request(request)
    auto_half.order_fill(request, range(9), auto_half.external_tokens(request, 0))
    (order,) = auto_half.take_orders([], False).fuse
    assert (order.wish.reuse, order.wish.ratio, order.wish.close_call) == ("epic", 0.1, 0.2)
    close = StepReport(fused={"a": {"way": "exact", "why": str(Reason.CLOSE_CALL)}})
    auto_half.note_report(close)
    assert auto_half.take_counts() == {"way exact": 1, f"why {Reason.CLOSE_CALL}": 1}
    told = auto_half.forget_request("a")
    assert told is not None
    assert told["kvweave"]["why"] == Reason.CLOSE_CALL
    assert told["kvweave"]["gate"] == {"weave": 0.3, "epic": 0.1, "reuse": 0.0}


@pytest.mark.usefixtures("stored")
def test_exact_blocks_keep_their_names_until_they_are_gone(half: SchedulerHalf) -> None:
    request, plain = MadeRequest("a", IDS, wish()), MadeRequest("b", IDS)
    cached = set(plain.block_hashes[:2])
    half.look_at_cache(cached.__contains__)
    half.plan_request(request)
    assert request.block_hashes[:2] == plain.block_hashes[:2]
    assert not set(request.block_hashes[2:]) & set(plain.block_hashes)
    # evicted before it was scheduled: what is filled now must not be called exact
    assert half.external_tokens(request, BLOCK) == len(IDS) - 1 - BLOCK
    assert request.block_hashes[:1] == plain.block_hashes[:1]
    assert not set(request.block_hashes[1:]) & set(plain.block_hashes)


@pytest.mark.usefixtures("stored")
def test_the_same_prompt_finds_its_own_fused_blocks(half: SchedulerHalf) -> None:
    one, two = MadeRequest("a", IDS, wish()), MadeRequest("b", IDS, wish())
    half.plan_request(one)
    half.plan_request(two)
    assert one.block_hashes == two.block_hashes
    other = MadeRequest("c", IDS, wish(ratio=0.5))
    half.plan_request(other)
    assert not set(one.block_hashes) & set(other.block_hashes)


@pytest.mark.usefixtures("stored")
def test_what_vllm_has_exactly_is_not_fused(half: SchedulerHalf) -> None:
    request = MadeRequest("a", IDS, wish())
    before = list(request.block_hashes)
    half.look_at_cache(lambda _hash: True)
    half.plan_request(request)
    assert half.external_tokens(request, 128) == 0
    assert request.block_hashes == before
    reply = half.forget_request("a")
    assert reply is not None
    assert reply["kvweave"]["way"] == "exact"
    assert "rows" in reply["kvweave"]["why"]


def test_what_is_not_stored_is_computed_by_vllm_and_owed(half: SchedulerHalf) -> None:
    ids = (*PREAMBLE, *reversed(IDS[8:128]), *QUESTION)
    request = MadeRequest("a", ids, wish())
    half.plan_request(request)
    assert half.external_tokens(request, 0) == 0
    reply = half.forget_request("a")
    assert reply is not None
    assert reply["kvweave"]["missing"] == 4
    assert half.is_owed
    (order,) = half.take_orders([], True).encode
    assert order.preamble_ids == PREAMBLE
    assert (len(order.in_front), len(order.behind)) == (1, 3)
    assert half.is_owed, "until the worker has settled it"
    again = MadeRequest("b", ids, wish())
    half.plan_request(again)
    half.forget_request("b")
    assert not half.take_orders([], True).encode, "ordered once"
    half.note_report(StepReport(settled={order.number}))
    assert not half.is_owed


def test_what_the_worker_made_counts_as_stored(
    half: SchedulerHalf, identity: ModelIdentity
) -> None:
    ids = (*PREAMBLE, *[i + 1 for i in IDS[8:128]], *QUESTION)
    names = identity.names(PREAMBLE, "")
    keys = [names.key(ids[start:end]) for start, end in SPANS]
    half.note_report(StepReport(made=list(keys)))
    request = MadeRequest("a", ids, wish())
    half.plan_request(request)
    assert half.external_tokens(request, 0) == len(ids) - 1


@pytest.mark.usefixtures("stored")
def test_an_adapter_has_chunk_kv_of_its_own(
    half: SchedulerHalf, identity: ModelIdentity, chat_model_folder: Path, tmp_path: Path
) -> None:
    folder = make_adapter(chat_model_folder, tmp_path / "adapter", seed=1)
    request = MadeRequest("a", IDS, wish())
    request.lora_request = SimpleNamespace(lora_int_id=3, lora_path=str(folder))
    half.plan_request(request)
    assert half.external_tokens(request, 0) == 0
    told = half.forget_request("a")
    assert told is not None
    assert told["kvweave"]["missing"] == 4, "what the bare model has is not its own"
    (encode,) = half.take_orders([], True).encode
    assert encode.lora is not None
    assert encode.lora.number == 3
    adapted = identity.with_lora(encode.lora)
    names = adapted.names(PREAMBLE, "")
    made = [names.exact_key(CHUNKS[0]), *map(names.key, CHUNKS[1:])]
    half.note_report(StepReport(settled={encode.number}, made=list(made)))
    again = MadeRequest("b", IDS, wish())
    again.lora_request = request.lora_request
    half.plan_request(again)
    half.order_fill(again, range(9), half.external_tokens(again, 0))
    (order,) = half.take_orders([], False).fuse
    assert order.lora == encode.lora
    auto = MadeRequest("c", IDS, wish(reuse="auto"))
    auto.lora_request = request.lora_request
    half.plan_request(auto)
    told = half.forget_request("c")
    assert told is not None
    assert told["kvweave"]["why"] == Reason.NOT_CALIBRATED


def test_what_the_worker_lost_is_looked_for_and_made_again(
    half: SchedulerHalf, identity: ModelIdentity
) -> None:
    ids = (*PREAMBLE, *[i + 2 for i in IDS[8:128]], *QUESTION)
    names = identity.names(PREAMBLE, "")
    keys = [names.exact_key(ids[8:38]), *(names.key(ids[start:end]) for start, end in SPANS[1:])]
    half.note_report(StepReport(made=list(keys)))
    half.note_report(StepReport(lost=keys[1:2]))
    half.plan_request(MadeRequest("a", ids, wish()))
    told = half.forget_request("a")
    assert told is not None
    assert (told["kvweave"]["stored"], told["kvweave"]["missing"]) == (3, 1)
    (order,) = half.take_orders((), is_idle=True).encode
    assert (order.in_front, order.behind) == ((), (ids[38:68],))


def test_a_tenant_finds_its_own_chunks_alone(half: SchedulerHalf, stored: None) -> None:
    request = MadeRequest("a", IDS, wish(tenant="them"))
    half.plan_request(request)
    assert half.external_tokens(request, 0) == 0


def test_blocks_that_another_writes_in_this_step_are_not_read(
    half: SchedulerHalf, stored: None
) -> None:
    request = MadeRequest("a", IDS, wish())
    half.plan_request(request)
    num_external = half.external_tokens(request, 2 * BLOCK)
    half.order_fill(request, range(9), num_external)
    (order,) = half.take_orders([("a", [8]), ("other", [1, 40])], False).fuse
    assert not order.is_local_ready


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_request": SimpleNamespace(lora_int_id=1, lora_path="gone")}, "LoRA"),
        ({"lora_request": SimpleNamespace(load_inplace=True)}, "replaced in place"),
        ({"mm_features": [1]}, "images"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"resumable": True}, "session"),
        ({"prompt_token_ids": None}, "no token ids"),
        ({"kv_transfer_params": {"kvweave": {"chunks": [[0, 5000]]}}}, "question"),
        ({"kv_transfer_params": {"kvweave": None}}, "null"),
    ],
)
@pytest.mark.usefixtures("stored")
def test_what_cannot_be_fused_is_answered_and_said(
    half: SchedulerHalf, change: dict[str, Any], words: str
) -> None:
    request = MadeRequest("a", IDS, wish())
    for name, value in change.items():
        setattr(request, name, value)
    before = list(request.block_hashes)
    half.plan_request(request)
    assert half.external_tokens(request, 0) == 0
    assert request.block_hashes == before
    reply = half.forget_request("a")
    assert reply is not None
    assert reply["kvweave"]["way"] == "refused"
    assert words in reply["kvweave"]["why"]


@pytest.mark.usefixtures("stored")
def test_chunks_that_are_no_more_are_ordered_to_be_deleted(
    half: SchedulerHalf, encoder: ChunkEncoder
) -> None:
    gone = make_chunk_id(CHUNKS[1])
    half.note_report(StepReport(made=[encoder.key(CHUNKS[1])]))
    half.plan_request(MadeRequest("a", [1], {"forget": [gone], "tenant": "t"}))
    (order,) = half.take_orders([], False).forget
    assert order.chunk_ids == (gone,)
    assert half.forget_request("a") == {
        "kvweave": {"way": "exact", "why": "it forgets chunks", "forgotten": 1}
    }
    encoder.store.delete_chunks([gone])  # the worker does, and says which keys
    half.note_report(StepReport(lost=[encoder.key(CHUNKS[1])]))
    half.plan_request(MadeRequest("b", IDS, wish()))
    told = half.forget_request("b")
    assert told is not None
    assert (told["kvweave"]["stored"], told["kvweave"]["missing"]) == (3, 1)
    encoder.encode(as_chunks(CHUNKS))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"forget": "abc"}, "must be a list"),
        ({"forget": []}, "must be a list of 1 to"),
        ({"forget": ["x"]}, "is no id of a chunk"),
        ({"forget": ["00"], "chunks": SPANS}, "stands alone"),
    ],
)
def test_what_cannot_be_forgotten_is_named(
    half: SchedulerHalf, given: dict[str, Any], words: str
) -> None:
    half.plan_request(MadeRequest("a", [1], given))
    assert not half.take_orders([], False).forget
    told = half.forget_request("a")
    assert told is not None
    assert told["kvweave"]["way"] == "refused"
    assert words in told["kvweave"]["why"]


@pytest.mark.usefixtures("stored")
def test_a_chunk_is_stored_once_every_rank_has_its_heads_of_it(
    half_of_two: SchedulerHalf, identity: ModelIdentity
) -> None:
    """What was stored with all heads is none of theirs."""

    def missing() -> int:
        half_of_two.plan_request(MadeRequest("a", IDS, wish()))
        told = half_of_two.forget_request("a")
        assert told is not None
        return int(told["kvweave"]["missing"])

    def keys(rank: int) -> list[bytes]:
        names = identity.of_rank(rank, 2).names(PREAMBLE, "")
        behind = [names.key(IDS[start:end]) for start, end in SPANS[1:]]
        return [names.exact_key(CHUNKS[0]), *behind]

    assert missing() == 4
    half_of_two.note_report(StepReport(made=keys(0)))
    assert missing() == 4
    half_of_two.note_report(StepReport(made=keys(1)[:3]))
    assert missing() == 1
    half_of_two.note_report(StepReport(made=keys(1)[3:]))
    assert missing() == 0
    half_of_two.note_report(StepReport(lost=keys(1)[1:2]))
    assert missing() == 1


def test_ranks_have_turns_of_a_chunk_in_idle_steps_and_for_a_share_of_the_time(
    half_of_two: SchedulerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def has_turn(*, is_idle: bool = False) -> bool:
        return half_of_two.take_orders([], is_idle).has_turn

    assert not has_turn(), "nothing is owed"
    ids = (*PREAMBLE, *[i + 2 for i in IDS[8:128]], *QUESTION)
    half_of_two.plan_request(MadeRequest("a", ids, wish()))
    half_of_two.forget_request("a")
    orders = half_of_two.take_orders([], False)
    assert [len(each.in_front + each.behind) for each in orders.encode] == [1] * 4
    assert orders.has_turn
    now_s[0] += 2.0
    assert not has_turn(), "the ranks are at it"
    assert has_turn(is_idle=True)
    first, second, *rest = (each.number for each in orders.encode)
    half_of_two.note_report(StepReport(settled={first}))
    now_s[0] += 17.9
    assert not has_turn(), "nine times as long passes as it took"
    now_s[0] += 0.2
    assert has_turn()
    half_of_two.note_report(StepReport(settled={second, *rest}))
    now_s[0] += 1e6
    assert not has_turn()
    assert has_turn(is_idle=True)
    half_of_two.plan_request(MadeRequest("b", [1], {"forget": [make_chunk_id(CHUNKS[1])]}))
    orders = half_of_two.take_orders([], False)
    assert orders.has_turn, "it is done once more behind what waits to be encoded"
    half_of_two.note_report(StepReport(settled={orders.forget[0].number}))
    now_s[0] += 1e6
    assert not has_turn()


def test_a_selector_of_another_package_is_not_asked_by_ranks(
    half: SchedulerHalf,
    half_of_two: SchedulerHalf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would choose by the heads it has."""
    (tmp_path / "theirs-1.0.dist-info").mkdir()
    entry = "[kvweave.selectors]\nlast-rows = last_rows:make_selector\n"
    (tmp_path / "theirs-1.0.dist-info/entry_points.txt").write_text(entry)
    example = Path(__file__).resolve().parents[3] / "examples/selector/last_rows.py"
    (tmp_path / "last_rows.py").write_text(
        f"{example.read_text()}\n\nmake = lambda _: LastRows()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    strategies._find_installed.cache_clear()
    try:
        for each, is_refused in ((half, False), (half_of_two, True)):
            each.plan_request(MadeRequest("a", IDS, wish(reuse="last-rows", ratio=0.2)))
            told = each.forget_request("a")
            assert told is not None
            assert ("heads of one rank" in told["kvweave"].get("why", "")) is is_refused
    finally:
        strategies._find_installed.cache_clear()
