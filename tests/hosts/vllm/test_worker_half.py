"""Blocks are filled with what fusion makes, behind what vLLM has, and reported where that fails.

kvweave's own decoder stands in for vLLM's modules; what is computed is the same.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvweave.corpus.chunker import make_chunk_id
from kvweave.fuse.encode.preparation import Preparation
from kvweave.hosts.vllm.identity import ModelIdentity, ServedModel, identify
from kvweave.hosts.vllm.kv_blocks import KVBlocks
from kvweave.hosts.vllm.lora import Adapter
from kvweave.hosts.vllm.orders import EncodeOrder, ForgetOrder, FuseOrder, StepOrders
from kvweave.hosts.vllm.reuse_request import ReuseRequest
from kvweave.hosts.vllm.worker_half import WorkerHalf
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from kvweave.model.sequence_kv import SequenceKV
from kvweave.reasons import Reason
from worlds.tiny_models import make_chat_model_folder

SIZE, NUM_BLOCKS = 16, 40
SPANS = ((8, 38), (38, 70), (75, 101))  # with a gap of five tokens
IDS = tuple(3 + i * 7 % 90 for i in range(113))
TABLE = tuple(range(30, 22, -1))  # of a prompt of 113 tokens


class Blocks:
    """A paged cache as FlashAttention has it, and a writer that can be broken."""

    def __init__(self, decoder: Decoder) -> None:
        spec = decoder.spec
        shape = (NUM_BLOCKS, spec.num_kv_heads, SIZE, 2 * spec.head_dim)
        self.caches = [torch.full(shape, 7.0) for _ in range(spec.num_layers)]
        self.is_broken = False
        self.kv = KVBlocks(self.caches, [self.write] * spec.num_layers, SIZE, spec.head_dim)

    def write(self, cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        if self.is_broken:
            raise RuntimeError("no such operator")
        keys, values = cache.transpose(1, 2).split(k.shape[-1], dim=-1)
        keys[slots // SIZE, slots % SIZE] = k
        values[slots // SIZE, slots % SIZE] = v


@pytest.fixture(scope="module")
def decoder(chat_model_folder: Path) -> Decoder:
    return load_decoder(chat_model_folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def identity(chat_model_folder: Path) -> ModelIdentity:
    served = ServedModel(str(chat_model_folder), None, torch.float32, None)
    return identify(served, Preparation.parse("isolated"), "raw")


@pytest.fixture
def blocks(decoder: Decoder) -> Blocks:
    return Blocks(decoder)


@pytest.fixture
def worker(decoder: Decoder, identity: ModelIdentity, blocks: Blocks) -> Iterator[WorkerHalf]:
    store = KVStore(StoreConfig(tiers=(HostTierConfig(1 << 26, pinned=False),)))
    made = WorkerHalf(decoder, blocks.kv, store, identity)
    yield made
    made.close()


@pytest.fixture(scope="module")
def exact(decoder: Decoder) -> SequenceKV:
    """Full prefill of the prompt."""
    kv = decoder.new_kv(len(IDS))
    decoder.forward([Rows(IDS, range(len(IDS)), kv, [len(IDS) - 1])])
    return kv


def order(name: str = "a", num_local: int = 0, **more: object) -> FuseOrder:
    wish = ReuseRequest(8, SPANS, "weave", float(more.pop("ratio", 1.0)), is_encoded_first=True)  # type: ignore[arg-type]
    return FuseOrder(name, IDS, wish, TABLE, num_local, **more)  # type: ignore[arg-type]


def read(blocks: Blocks, layer: int) -> Tensor:
    """Keys and values of the prompt but for its last token, [T - 1, Hk, 2 D]."""
    table = torch.tensor(TABLE)
    return blocks.caches[layer][table].transpose(1, 2).flatten(0, 1)[: len(IDS) - 1]


def truth(exact: SequenceKV, layer: int) -> Tensor:
    return torch.cat([exact.keys(layer), exact.values(layer)], -1)[: len(IDS) - 1]


def test_with_every_row_recomputed_blocks_hold_full_prefill(
    worker: WorkerHalf, blocks: Blocks, exact: SequenceKV
) -> None:
    worker.fill(StepOrders([order()]))
    for layer in range(len(blocks.caches)):
        torch.testing.assert_close(read(blocks, layer), truth(exact, layer), rtol=1e-4, atol=1e-5)
    (told,) = worker.take_report().fused.values()
    assert (told["reused"], told["recomputed"]) == (0, 32 + 26)
    assert told["computed"] == 5 + 12, "the gap and the question"
    assert not worker.take_failed_blocks()
    untouched = [i for i in range(NUM_BLOCKS) if i not in TABLE]
    assert all((cache[untouched] == 7.0).all() for cache in blocks.caches)
    assert (blocks.caches[0][TABLE[-1], :, -1] == 7.0).all(), "the last token is vLLM's"


def test_a_share_of_the_rows_leaves_the_rest_as_stored(
    worker: WorkerHalf, blocks: Blocks, exact: SequenceKV
) -> None:
    worker.fill(StepOrders([order(ratio=0.2)]))
    (told,) = worker.take_report().fused.values()
    assert told["reused"] > 0 < told["recomputed"]
    last = len(blocks.caches) - 1
    assert (read(blocks, last) - truth(exact, last)).abs().max() > 1e-3


def test_a_close_call_is_left_to_vllm(worker: WorkerHalf, blocks: Blocks) -> None:
    made = order(ratio=0.2)
    worker.fill(StepOrders([replace(made, wish=replace(made.wish, close_call=1e3))]))
    assert worker.take_report().fused == {"a": {"way": "exact", "why": Reason.CLOSE_CALL}}
    assert worker.take_failed_blocks() == set(TABLE)
    worker.fill(StepOrders([replace(made, wish=replace(made.wish, close_call=1e-9))]))
    (told,) = worker.take_report().fused.values()
    assert told["reused"] > 0
    assert not worker.take_failed_blocks()


def test_an_adapter_is_computed_with_and_stores_under_names_of_its_own(
    decoder: Decoder, identity: ModelIdentity, blocks: Blocks, tmp_path: Path
) -> None:
    """Another model stands in for one with an adapter on it."""
    adapted = load_decoder(make_chat_model_folder(tmp_path, seed=5), device="cpu", dtype="float32")
    store = KVStore(StoreConfig(tiers=(HostTierConfig(1 << 26, pinned=False),)))
    asked: list[Adapter] = []

    def adapt(lora: Adapter) -> Decoder:
        asked.append(lora)
        return adapted

    worker = WorkerHalf(decoder, blocks.kv, store, identity, adapt)
    lora = Adapter(4, "d1")
    worker.fill(StepOrders([order(), replace(order("b"), lora=lora)]))
    report = worker.take_report()
    assert [told["way"] for told in report.fused.values() if "way" in told] == []
    assert len(set(report.made)) == 2 * len(SPANS)
    assert asked == [lora]
    kv = adapted.new_kv(len(IDS))
    adapted.forward([Rows(IDS, range(len(IDS)), kv, [len(IDS) - 1])])
    for layer in range(len(blocks.caches)):
        torch.testing.assert_close(read(blocks, layer), truth(kv, layer), rtol=1e-4, atol=1e-5)
    worker.close()


def test_what_vllm_has_is_read_and_never_written(
    worker: WorkerHalf, blocks: Blocks, exact: SequenceKV
) -> None:
    had = 3 * SIZE  # the preamble, the first chunk and a part of the second
    slots = blocks.kv.slots(TABLE, 0, had)
    for layer in range(len(blocks.caches)):
        blocks.write(
            blocks.caches[layer], exact.keys(layer)[:had], exact.values(layer)[:had], slots
        )
    before = [cache[list(TABLE[:3])].clone() for cache in blocks.caches]
    worker.fill(StepOrders([order(num_local=had)]))
    for layer, front in enumerate(before):
        assert torch.equal(blocks.caches[layer][list(TABLE[:3])], front)
        torch.testing.assert_close(read(blocks, layer), truth(exact, layer), rtol=1e-4, atol=1e-5)
    (told,) = worker.take_report().fused.values()
    assert told["exact"] == 38


def test_what_is_being_written_in_this_step_is_not_read(
    worker: WorkerHalf, blocks: Blocks, exact: SequenceKV
) -> None:
    """The front is garbage until the forward pass: rows behind it take what is stored."""
    worker.fill(StepOrders([order(num_local=3 * SIZE, is_local_ready=False)]))
    for layer in range(len(blocks.caches)):
        got, wanted = read(blocks, layer)[3 * SIZE :], truth(exact, layer)[3 * SIZE :]
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        assert (read(blocks, layer)[: 3 * SIZE] == 7.0).all()


def test_what_cannot_be_filled_is_reported_with_all_that_lean_on_it(
    worker: WorkerHalf, blocks: Blocks
) -> None:
    blocks.is_broken = True
    worker.fill(StepOrders([order("a")]))
    assert worker.take_failed_blocks() == set(TABLE)
    assert worker.take_report().fused == {"a": {"way": "failed"}}
    assert not worker.take_failed_blocks(), "once"
    # another request of the step begins with blocks that the first was to fill
    worker.fill(StepOrders([order("a"), order("b", num_local=2 * SIZE)]))
    assert worker.take_report().fused["b"] == {"way": "failed"}
    blocks.is_broken = False
    worker.take_failed_blocks()
    worker.fill(StepOrders([order("a")]))
    assert "way" not in worker.take_report().fused["a"]
    assert not worker.take_failed_blocks()


def test_what_the_store_has_lost_is_reported_by_its_key(
    worker: WorkerHalf, blocks: Blocks, identity: ModelIdentity
) -> None:
    names, wanted = identity.names(IDS[:8], ""), order(ratio=0.2)
    worker.fill(StepOrders([wanted]))  # stores all three
    assert worker.take_report().lost == []
    worker._store.delete([names.key(IDS[38:70])])
    later = replace(wanted, request_id="b", wish=replace(wanted.wish, is_encoded_first=False))
    worker.fill(StepOrders([later]))
    report = worker.take_report()
    assert report.lost == [names.key(IDS[38:70])]
    assert len(report.fused["b"]["lost"]) == 1


def test_encoders_are_had_from_two_threads(
    worker: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(OrderedDict[Any, Any]):
        """Another thread has its turn after every look."""

        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            time.sleep(0.001)
            return found

    monkeypatch.setattr("kvweave.hosts.vllm.worker_half.KEPT_ENCODERS", 1)
    monkeypatch.setattr(worker, "_encoders", Slow())

    def have(number: int) -> None:
        for _ in range(100):
            worker._encoder((0,), str(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(have, range(4)))
    assert len(worker._encoders) == 1


def test_chunks_are_made_in_idle_steps(worker: WorkerHalf, identity: ModelIdentity) -> None:
    chunk = IDS[38:70]
    worker.fill(StepOrders(encode=[EncodeOrder(5, IDS[:8], "", (IDS[8:38],), (chunk,))]))
    until_s, made, settled = time.monotonic() + 60, list[bytes](), set[int]()
    while not settled and time.monotonic() < until_s:
        worker.rest(StepOrders(is_idle=True))
        report = worker.take_report()
        made += report.made
        settled |= report.settled
    names = identity.names(IDS[:8], "")
    assert settled == {5}
    assert made == [names.exact_key(IDS[8:38]), names.key(chunk)]


def test_chunks_that_are_no_more_are_deleted_before_the_step_whoever_stored_them(
    decoder: Decoder, identity: ModelIdentity, blocks: Blocks, tmp_path: Path
) -> None:
    names, gone = identity.names(IDS[:8], ""), IDS[38:70]
    tiers = (HostTierConfig(1 << 26, pinned=False), DiskTierConfig(tmp_path, fsync=False))
    cfg = StoreConfig(tiers=tiers)
    first = WorkerHalf(decoder, blocks.kv, KVStore(cfg), identity)
    first.fill(StepOrders([order(ratio=0.2)]))
    first.close()
    with KVStore(cfg) as other:
        keys = [names.key(gone), names.key(IDS[75:101])]
        assert [peek.residency for peek in other.peek(keys)] == [Residency.HERE] * 2
    second = WorkerHalf(decoder, blocks.kv, KVStore(cfg), identity)
    second.fill(StepOrders(forget=[ForgetOrder((make_chunk_id(gone),))]))
    assert names.key(gone) in second.take_report().lost
    second.close()
    with KVStore(cfg) as other:
        found = [peek.residency for peek in other.peek(keys)]
        assert found == [Residency.ABSENT, Residency.HERE]


def test_a_chunk_that_is_being_encoded_while_it_is_deleted_does_not_stay(
    worker: WorkerHalf, identity: ModelIdentity
) -> None:
    chunk = IDS[38:70]
    worker.fill(StepOrders(encode=[EncodeOrder(5, IDS[:8], "", (), (chunk,))]))
    worker.fill(StepOrders(forget=[ForgetOrder((make_chunk_id(chunk),))]))
    until_s, settled = time.monotonic() + 60, set[int]()
    while not {0, 5} <= settled and time.monotonic() < until_s:
        worker.rest(StepOrders(is_idle=True))
        settled |= worker.take_report().settled
    assert settled == {0, 5}
    (peek,) = worker._store.peek([identity.names(IDS[:8], "").key(chunk)])
    assert peek.residency is Residency.ABSENT
