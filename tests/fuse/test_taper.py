"""Rows that leave before the last layers: which, where, and what stands there afterwards."""

from dataclasses import replace

import pytest
import torch

from kvweave.fuse.drift import Mover, MoverRelay
from kvweave.fuse.fuse import select_rows
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.selectors.weave import weave
from kvweave.fuse.strategy import ModelFacts, Strategy
from kvweave.fuse.taper import Taper
from kvweave.kernels.rope import rotate
from kvweave.model.decoder import Decoder
from kvweave.model.rows import EarlyExit, Rows
from kvweave.model.sequence_kv import SequenceKV
from worlds.engine import make_decoder
from worlds.fuse import CHUNKS, World, assert_same, assert_same_kv, make_ids
from worlds.slices import InPages, make_pool
from worlds.tiny_models import make_model_folder

NUM_LAYERS = 7
EXACT = 1e-10  # float64


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    root = tmp_path_factory.mktemp("models")
    return make_decoder(make_model_folder(root, "llama", num_hidden_layers=NUM_LAYERS))


@pytest.fixture(scope="module")
def world(decoder: Decoder) -> World:
    return World(decoder, missing=(1,))


@pytest.mark.parametrize("layer", [0, 2, 5])
@pytest.mark.parametrize("name", ["weave", "fusionrag", "prophetkv"])
def test_a_tapered_pass_equals_the_pass_in_the_open(world: World, name: str, layer: int) -> None:
    taper = Taper(layer, 0.3)
    strategy = replace(world.strategy(name), taper=taper, drift=0.0)
    fused, ours = world.fuse(strategy, 0.5)
    stay = _staying(world, strategy, 0.5)
    must = world.request.must_compute
    rows, later = sorted([*fused.recomputed, *must]), sorted([*stay, *must])
    per_layer = [rows] * (layer + 1) + [later] * (NUM_LAYERS - layer - 1)
    assert fused.rows_per_layer == tuple(map(len, per_layer))
    assert_same(ours, world.dense_pass(*per_layer), 1e-5)


def _staying(world: World, strategy: Strategy, ratio: float) -> list[int]:
    selected, taper = select_rows(world.stitched(), strategy, ratio), strategy.taper
    assert selected.leaving is not None
    assert taper is not None
    stay = selected.leaving.stay.tolist()
    assert len(stay) == taper.staying(len(selected.chosen)) < len(selected.chosen)
    assert set(stay) < set(selected.chosen.tolist())
    return list(stay)


def test_those_that_stay_are_looked_at_most(world: World) -> None:
    selector = weave(NUM_LAYERS)
    scores = dict(zip(world.request.hits, selector.scores(world.scene()).tolist(), strict=True))
    stay = _staying(world, Strategy("any", selector, 0.6, taper=Taper(3, 0.25)), 0.6)
    assert stay == sorted(sorted(scores, key=lambda hit: -scores[hit])[: len(stay)])


def test_behind_the_layer_rows_that_left_are_what_was_stored_and_moved(world: World) -> None:
    """By the mean of those that stayed, as if the others had never been chosen."""
    strategy = replace(world.strategy("weave"), taper=Taper(3, 0.3))
    fused, ours = world.fuse(strategy, 0.5)
    stay = _staying(world, strategy, 0.5)
    left = sorted(set(fused.recomputed) - set(stay))
    laid = world.laid_by_hand()
    kept = [span for span in world.request.placed if set(range(span.start, span.end)) & set(stay)]
    for layer in range(4, NUM_LAYERS):
        for position in left:
            moved = any(span.start <= position < span.end for span in kept)
            same = torch.allclose(ours.values[layer][position], laid.values(layer)[position])
            assert same is not moved
    layers = [0, 1]  # from the second on everything drifts
    assert_same_kv(ours, world.full, fused.recomputed, layers)


@pytest.mark.parametrize("layer", [NUM_LAYERS - 1, NUM_LAYERS, 99])
def test_a_taper_at_the_last_layer_is_none(world: World, layer: int) -> None:
    strategy = replace(world.strategy("weave"), taper=Taper(layer, 0.2))
    fused, ours = world.fuse(strategy, 0.4)
    plain, want = world.fuse(replace(strategy, taper=None), 0.4)
    assert fused.rows_per_layer == plain.rows_per_layer
    assert fused.work == plain.work
    assert_same(ours, want, EXACT)


def test_nothing_leaves_when_everything_is_recomputed(world: World) -> None:
    strategy = replace(world.strategy("weave"), taper=Taper(0, 0.1))
    fused, ours = world.fuse(strategy, 1.0)
    assert set(fused.rows_per_layer) == {len(world.request.prompt_ids) - _exact_tokens(world)}
    assert_same(ours, world.full, 1e-5)


def _exact_tokens(world: World) -> int:
    hits, must = world.request.hits, world.request.must_compute
    return len(world.request.prompt_ids) - len(hits) - len(must)


def test_work_counts_the_rows_of_each_layer(world: World) -> None:
    taper = Taper(2, 0.25)
    strategy = replace(world.strategy("weave"), taper=taper)
    fused, _ = world.fuse(strategy, 0.5)
    more, _ = world.fuse(replace(strategy, taper=None), 0.5)
    chosen = len(fused.recomputed)
    gone = (chosen - taper.staying(chosen)) * (NUM_LAYERS - 3)
    assert more.work - fused.work == pytest.approx(
        gone / (NUM_LAYERS * len(world.request.prompt_ids))
    )


@pytest.mark.parametrize("name", ["weave", "weave-deep", "fusionrag", "prophetkv", "random"])
def test_rows_that_stay_are_among_those_that_start(world: World, name: str) -> None:
    selector = world.strategy(name).selector
    assert selector is not None
    assert not selector.in_flight
    chosen, stay = (set(rows.tolist()) for rows in selector.select(world.scene(), (20, 6)))
    assert (len(chosen), len(stay)) == (20, 6)
    assert stay < chosen


def test_depth_is_what_a_row_costs() -> None:
    assert Taper(24, 0.2).depth(30) == pytest.approx((24 + 0.2 * 6) / 30)
    assert Taper(40, 0.2).depth(30) == Taper(29, 0.2).depth(30) == 1.0, "no row leaves there"
    assert Taper(28, 0.2).depth(30) < 1
    assert [Taper(1, 0.2).staying(n) for n in (1, 2, 3, 10, 450)] == [1, 1, 1, 2, 90]
    facts = ModelFacts(30, (21,))
    assert open_strategy("weave", facts).depth(30) == pytest.approx(0.84)
    assert open_strategy("prophetkv", facts).depth(30) == 1.0
    assert open_strategy("weave", facts).taper == open_strategy("weave-deep", facts).taper


@pytest.mark.parametrize("size", [1, 3, 7, 99])
def test_slices_leave_what_one_tapered_pass_leaves(decoder: Decoder, size: int) -> None:
    """Also a slice of which every row leaves, alone in its batch."""
    world = World(decoder, chunks=[*CHUNKS, CHUNKS[2]], missing=(1,))
    for drift, tolerance in ((0.0, EXACT), (0.5, 1e-4)):
        world_way = replace(world.strategy("weave"), drift=drift, taper=Taper(3, 0.2))
        _, want = world.fuse(world_way, 0.5)
        ours = InPages(world, world_way, 0.5, make_pool(decoder), 3)
        while ours.left.left:
            logits = decoder.forward([ours.rows(size)])
        done = ours.result(logits[0])
        torch.testing.assert_close(done.logits, want.logits, atol=1e-4, rtol=1e-4)
        assert_same_kv(done, want, tolerance=tolerance)


def test_rows_of_others_run_on_when_some_leave(decoder: Decoder) -> None:
    (a, b, c) = make_ids(8, 9, 7, 5)
    alone = [decoder.new_kv(16) for _ in range(3)]
    want = [
        decoder.forward([Rows(ids, range(len(ids)), kv, [len(ids) - 1])])
        for ids, kv in zip((a, b, c), alone, strict=True)
    ]
    kvs = [_zeros(decoder) for _ in range(3)]
    got = decoder.forward(
        [
            Rows(a, range(9), kvs[0], [8]),
            Rows(b, range(7), kvs[1], [], early_exit=EarlyExit(2, [])),
            Rows(c, range(5), kvs[2], [4], early_exit=EarlyExit(4, [2, 4])),
        ]
    )
    torch.testing.assert_close(got[0], want[0][0])
    by_itself = Rows(c, range(5), _zeros(decoder), [4], early_exit=EarlyExit(4, [2, 4]))
    torch.testing.assert_close(got[1], decoder.forward([by_itself])[0])
    assert got.shape == (2, decoder.spec.vocab_size)
    for layer in range(NUM_LAYERS):
        torch.testing.assert_close(kvs[0].keys(layer), alone[0].keys(layer))
        same = torch.equal(kvs[1].keys(layer)[:7], alone[1].keys(layer))
        assert same is (layer <= 2)
        if layer <= 4:
            torch.testing.assert_close(kvs[2].values(layer)[:5], alone[2].values(layer))


def _zeros(decoder: Decoder) -> SequenceKV:
    """Something to look at where nothing is written."""
    kv = decoder.new_kv(16)
    kv.reserve(9)
    for layer in range(NUM_LAYERS):
        kv.keys(layer).zero_()
        kv.values(layer).zero_()
    return kv


def test_a_batch_that_leaves_as_a_whole_gives_no_logits(decoder: Decoder) -> None:
    (ids,) = make_ids(8, 6)
    kv = decoder.new_kv(8)
    logits = decoder.forward([Rows(ids, range(6), kv, [], early_exit=EarlyExit(1, []))])
    assert logits.shape == (0, decoder.spec.vocab_size)
    angles = decoder.angles(torch.arange(6))
    fresh = decoder.qkv(0, decoder.embed(torch.tensor(ids)))
    torch.testing.assert_close(kv.keys(0), rotate(fresh.k, angles))


def test_the_second_mover_is_made_when_it_is_its_turn(world: World) -> None:
    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def move(self, layer: int, *_: object) -> None:
            calls.append((self.name, layer))

    calls: list[tuple[str, int]] = []
    made: list[str] = []

    def behind() -> Mover:
        made.append("behind")
        return Noted("behind")

    relay = MoverRelay(Noted("first"), 1, behind)
    for layer in (0, 1):
        relay.move(layer, None, None, None)  # type: ignore[arg-type]
    assert made == []
    for layer in (2, 3, 1):
        relay.move(layer, None, None, None)  # type: ignore[arg-type]
    assert made == ["behind"]
    assert calls == [("first", 0), ("first", 1), ("behind", 2), ("behind", 3), ("first", 1)]
