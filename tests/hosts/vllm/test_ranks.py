"""Tensor-parallel ranks fuse one prompt together: each its heads, all the same rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvweave.corpus.chunker import make_chunk_id
from kvweave.fuse.encode.preparation import Preparation
from kvweave.hosts.vllm.identity import ModelIdentity, ServedModel, identify
from kvweave.hosts.vllm.kv_blocks import KVBlocks
from kvweave.hosts.vllm.orders import (
    EncodeOrder,
    ForgetOrder,
    FuseOrder,
    StepOrders,
    StepReport,
)
from kvweave.hosts.vllm.reuse_request import ReuseRequest
from kvweave.hosts.vllm.worker_half import WorkerHalf
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.model.load import load_decoder
from worlds.ranks import RankDecoder, Ranks

SIZE, NUM_BLOCKS = 16, 40
SPANS = ((8, 38), (38, 70), (75, 101))
IDS = tuple(3 + i * 7 % 90 for i in range(113))
TABLE = tuple(range(30, 22, -1))
FRONT, BEHIND = (IDS[8:38],), (IDS[38:70], IDS[75:101])


class Rank(NamedTuple):
    """A worker, the store behind it and the paged cache that it fills, [B, Hk, N, 2 D]."""

    half: WorkerHalf
    identity: ModelIdentity
    store: KVStore
    caches: list[Tensor]

    def key(self, ids: tuple[int, ...], *, in_front: bool = False) -> bytes:
        names = self.identity.names(IDS[:8], "")
        return names.exact_key(ids) if in_front else names.key(ids)


class Side:
    """All ranks of one served model."""

    def __init__(self, folder: Path, disk: Path, count: int) -> None:
        self.meeting = Ranks(count)
        served = ServedModel(str(folder), None, torch.float32, None)
        whole = identify(served, Preparation.parse("isolated"), "raw")
        self.ranks = [self._make(folder, disk, whole, rank) for rank in range(count)]

    def _make(self, folder: Path, disk: Path, whole: ModelIdentity, rank: int) -> Rank:
        identity = whole.of_rank(rank, self.meeting.count)
        spec = identity.spec
        loaded = load_decoder(folder, device="cpu", dtype="float32")
        decoder: Any = RankDecoder(loaded, spec, rank, self.meeting)
        if self.meeting.count == 1:
            decoder = loaded
        shape = (NUM_BLOCKS, spec.num_kv_heads, SIZE, 2 * spec.head_dim)
        caches = [torch.zeros(shape) for _ in range(spec.num_layers)]
        blocks = KVBlocks(caches, [write] * spec.num_layers, SIZE, spec.head_dim)
        tiers = (HostTierConfig(1 << 26, pinned=False), DiskTierConfig(disk))
        store = KVStore(StoreConfig(tiers=tiers))
        return Rank(WorkerHalf(decoder, blocks, store, identity), identity, store, caches)

    def fill(self, orders: StepOrders) -> list[StepReport]:
        def step(rank: Rank) -> StepReport:
            rank.half.fill(orders)
            return rank.half.take_report()

        return self.meeting.all([lambda rank=rank: step(rank) for rank in self.ranks])

    def rest(self, orders: StepOrders) -> list[StepReport]:
        def step(rank: Rank) -> StepReport:
            rank.half.rest(orders)
            return rank.half.take_report()

        return self.meeting.all([lambda rank=rank: step(rank) for rank in self.ranks])

    def kv(self, layer: int) -> Tensor:
        """[T - 1, Hk, 2 D] of the prompt with the heads of all ranks."""
        table = torch.tensor(TABLE)
        parts = [rank.caches[layer][table].transpose(1, 2).flatten(0, 1) for rank in self.ranks]
        return torch.cat(parts, dim=1)[: len(IDS) - 1]

    def close(self) -> None:
        for rank in self.ranks:
            rank.half.close()


def write(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    keys, values = cache.transpose(1, 2).split(k.shape[-1], dim=-1)
    keys[slots // SIZE, slots % SIZE] = k
    values[slots // SIZE, slots % SIZE] = v


@pytest.fixture
def alone(chat_model_folder: Path, tmp_path: Path) -> Iterator[Side]:
    side = Side(chat_model_folder, tmp_path / "alone", 1)
    yield side
    side.close()


@pytest.fixture
def two(chat_model_folder: Path, tmp_path: Path) -> Iterator[Side]:
    side = Side(chat_model_folder, tmp_path / "two", 2)
    yield side
    side.close()


def order(reuse: str = "weave", ratio: float = 0.3, *, encoded: bool = True) -> FuseOrder:
    wish = ReuseRequest(8, SPANS, reuse, ratio, is_encoded_first=encoded)
    return FuseOrder("a", IDS, wish, TABLE, 0)


def told(reports: list[StepReport]) -> list[dict[str, Any]]:
    """What the ranks say of the request, without times."""
    fields = [report.fused["a"] for report in reports]
    return [{k: v for k, v in each.items() if not k.endswith("_ms")} for each in fields]


@pytest.mark.parametrize(
    ("reuse", "ratio"),
    [
        ("reuse", 0.0), ("weave", 0.3), ("weave-deep", 0.3), ("weave-through", 0.5),
        ("cacheblend", 0.3), ("cacheblend-gradual", 0.3), ("kvshare-like", 0.3),
        ("fusionrag", 0.3), ("prophetkv", 0.3), ("epic", 0.3), ("weave", 1.0),
    ],
)  # fmt: skip
def test_two_ranks_fill_what_one_fills(alone: Side, two: Side, reuse: str, ratio: float) -> None:
    one = told(alone.fill(StepOrders([order(reuse, ratio)])))[0]
    both = told(two.fill(StepOrders([order(reuse, ratio)])))
    for rank in both:
        assert {**rank, "loaded_bytes": 0} == {**one, "loaded_bytes": 0}
    if reuse == "reuse":
        assert one["reused"] > 0
    for layer in range(len(alone.ranks[0].caches)):
        torch.testing.assert_close(two.kv(layer), alone.kv(layer), rtol=1e-4, atol=1e-5)


def test_a_rank_stores_its_heads_under_a_name_of_its_own(two: Side) -> None:
    reports = two.fill(StepOrders([order()]))
    made = [set(report.made) for report in reports]
    assert len(made[0]) == len(made[1]) == 3
    assert not made[0] & made[1]
    for rank, keys in zip(two.ranks, made, strict=True):
        assert keys == {rank.key(FRONT[0], in_front=True), *map(rank.key, BEHIND)}


def test_what_one_rank_has_lost_is_computed_by_all(two: Side) -> None:
    two.fill(StepOrders([order()]))
    second = two.ranks[1]
    second.store.delete([second.key(BEHIND[0])])  # type: ignore[list-item]
    reports = two.fill(StepOrders([order(encoded=False)]))
    assert told(reports)[0] == told(reports)[1]
    assert reports[0].fused["a"]["lost"] == ["absent"]
    assert [report.lost for report in reports] == [[rank.key(BEHIND[0])] for rank in two.ranks]


def test_what_one_rank_lacks_all_encode_again(two: Side) -> None:
    two.fill(StepOrders([order()]))
    first = two.ranks[0]
    first.store.delete([first.key(BEHIND[1])])  # type: ignore[list-item]
    reports = two.fill(StepOrders([order()]))
    assert "lost" not in reports[0].fused["a"]
    assert told(reports)[0] == told(reports)[1]


def test_chunks_are_made_in_turns_by_all_at_once(two: Side) -> None:
    wanted = StepOrders(encode=[EncodeOrder(7, IDS[:8], "", FRONT, BEHIND)])
    two.fill(wanted)
    assert not any(two.rest(StepOrders())), "vLLM is busy"
    reports = two.rest(StepOrders(has_turn=True))
    assert [report.settled for report in reports] == [{7}, {7}]
    assert [len(report.made) for report in reports] == [3, 3]
    fused = two.fill(StepOrders([order(encoded=False)]))
    assert "lost" not in fused[0].fused["a"]
    assert not any(two.rest(StepOrders(has_turn=True))), "nothing is left to do"


def test_a_chunk_that_is_no_more_while_it_waits_does_not_stay(two: Side) -> None:
    gone = make_chunk_id(BEHIND[0])
    two.fill(StepOrders(encode=[EncodeOrder(7, IDS[:8], "", (), BEHIND)]))
    two.fill(StepOrders(forget=[ForgetOrder((gone,), 8)]))
    assert two.rest(StepOrders(has_turn=True))[0].settled == {7}
    reports = two.rest(StepOrders(has_turn=True))
    assert [report.settled for report in reports] == [{8}, {8}]
    stored = [rank.store.peek([ChunkKey(rank.key(ids)) for ids in BEHIND]) for rank in two.ranks]
    there = [[peek.residency is not Residency.ABSENT for peek in peeks] for peeks in stored]
    assert there == [[False, True]] * 2


def test_a_rank_that_fails_in_a_pass_ends_it(two: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for it: a request cannot be left to vLLM by one of them."""

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(two.ranks[1].half, "_write", fail)
    with pytest.raises(MemoryError):
        two.fill(StepOrders([order()]))


def test_a_request_behind_unfilled_blocks_is_left_to_vllm_by_all(two: Side) -> None:
    for rank in two.ranks:
        rank.half._failed_blocks.update(TABLE[:1])
    behind = FuseOrder("a", IDS, order().wish, TABLE, SIZE)
    assert told(two.fill(StepOrders([behind]))) == [{"way": "failed"}] * 2
