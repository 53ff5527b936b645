"""A prompt whose rows run in slices, beside others, leaves what one fused pass leaves."""

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from kvweave.fuse.drift import Drift
from kvweave.fuse.prepared import SliceMover
from kvweave.model.batch_kv import PagedBatchKV
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import PagedKV
from kvweave.model.rows import Rows
from worlds.engine import make_decoder
from worlds.fuse import CHUNKS, SELECTING, Prefilled, World, assert_same_kv, full_prefill, make_ids
from worlds.slices import InPages, make_pool
from worlds.tiny_models import make_model_folder

IN_FLIGHT = ("cacheblend", "cacheblend-k", "cacheblend-gradual", "kvshare-like")
SLICED = ["reuse", *(name for name in SELECTING if name not in IN_FLIGHT)]
EXACT = 1e-10  # float64: another order of adding and nothing more
DRIFTED = 1e-4  # the mean of changes is float32, and is added to rows that later layers look at


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return make_decoder(make_model_folder(tmp_path_factory.mktemp("models"), "llama-yarn"))


def assert_same(ours: Prefilled, want: Prefilled, name: str) -> None:
    tolerance = DRIFTED if name.startswith("weave") else EXACT
    logits = max(tolerance, 1e-5)  # they are float32
    torch.testing.assert_close(ours.logits, want.logits, atol=logits, rtol=logits)
    assert_same_kv(ours, want, tolerance=tolerance)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SLICED)
def test_slices_leave_the_kv_of_one_pass(decoder: Decoder, name: str, seed: int) -> None:
    """Of any size, with a missing chunk in between and one that stands twice."""
    rng = random.Random(f"{name} {seed}")
    chunks = [*CHUNKS, CHUNKS[2]]
    world = World(decoder, chunks=chunks, missing=rng.choice([(), (1,), (0, 3)]))
    ratio = 0.0 if name == "reuse" else rng.choice([0.2, 0.5, 1.0])
    fused, want = world.fuse(name, ratio)
    ours = InPages(world, name, ratio, make_pool(decoder), 5)
    assert ours.prepared.recomputed == fused.recomputed
    assert ours.prepared.work == fused.work
    while ours.left.left:
        logits = decoder.forward([ours.rows(rng.randint(1, 12))])
    assert_same(ours.result(logits[0]), want, name)


@pytest.mark.parametrize("seed", range(6))
def test_slices_of_many_prompts_run_in_one_pass_with_others(decoder: Decoder, seed: int) -> None:
    """Two fused prompts, a full prefill and a decode; each gets what it gets alone."""
    rng = random.Random(seed)
    pool = make_pool(decoder)
    worlds = [World(decoder, chunks=rng.sample(CHUNKS, 3), missing=(1,)) for _ in range(2)]
    names = [rng.choice(SLICED[1:]), "weave"]
    fused = [
        InPages(world, name, 0.4, pool, 18 * i)
        for i, (world, name) in enumerate(zip(worlds, names, strict=True))
    ]
    (plain, told) = make_ids(seed, 40, 40)
    full, decoding = PagedKV(pool, range(36, 46)), PagedKV(pool, range(46, 56))
    done: list[torch.Tensor | None] = [None, None]
    step = 0
    while any(logits is None for logits in done):
        batch = [Rows([told[step]], [step], decoding, [0])]
        batch += [Rows(plain[step : step + 1], [step], full, [])] if step < 40 else []
        going = [i for i in range(2) if done[i] is None]
        parts = [fused[i].rows(rng.randint(1, 9)) for i in going]
        logits = decoder.forward([*batch, *parts])[1:]
        for i, rows in zip(going, parts, strict=True):
            if rows.wanted:
                done[i], logits = logits[0], logits[1:]
        step += 1
    for ours, world, name, logits in zip(fused, worlds, names, done, strict=True):
        assert logits is not None
        assert_same(ours.result(logits), world.fuse(name, 0.4)[1], name)
    want = full_prefill(decoder, plain[:step])
    for layer in range(decoder.spec.num_layers):
        torch.testing.assert_close(full.keys(layer), want.keys[layer], atol=EXACT, rtol=EXACT)


def computed(ours: InPages, decoder: Decoder, cuts: Sequence[int]) -> Prefilled:
    for start, end in zip([0, *cuts], [*cuts, len(ours.prepared.rows)], strict=True):
        ours.left.bonds = ()
        logits = decoder.forward([ours.rows(end - start)])
    return ours.result(logits[0])


def test_a_chunk_that_drifts_is_never_cut_because_it_would_drift_otherwise(
    decoder: Decoder,
) -> None:
    world = World(decoder, missing=(1,))
    want = world.fuse("weave", 0.7)[1]
    bonds = InPages(world, "weave", 0.7, make_pool(decoder), 0).prepared.bonds
    assert [end - start > 1 for start, end in bonds] == [True, True]
    for start, end in bonds:
        whole = computed(InPages(world, "weave", 0.7, make_pool(decoder), 0), decoder, [end])
        assert_same(whole, want, "weave")
        cut = computed(InPages(world, "weave", 0.7, make_pool(decoder), 0), decoder, [start + 1])
        assert (cut.keys[2] - want.keys[2]).abs().max() > 100 * DRIFTED


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_slice_that_failed_and_runs_again_moves_nothing_twice(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    world = World(decoder)
    want = world.fuse("weave", 0.5)[1]
    ours = InPages(world, "weave", 0.5, make_pool(decoder), 0)
    write = PagedBatchKV.write

    def failing(kv: PagedBatchKV, layer: int, *what: Any) -> None:
        if layer == at:
            raise RuntimeError("out of memory")
        write(kv, layer, *what)

    rows = ours.rows(99)
    monkeypatch.setattr(PagedBatchKV, "write", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.forward([rows])
    monkeypatch.undo()
    assert ours.prepared.mover(0, len(rows.positions)) is rows.hook
    assert_same(ours.result(decoder.forward([rows])[0]), want, "weave")


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_what_chooses_in_flight_cannot_be_sliced(decoder: Decoder, name: str) -> None:
    world = World(decoder)
    assert not world.strategy(name).can_be_sliced
    with pytest.raises(AssertionError, match="in flight"):
        InPages(world, name, 0.5, make_pool(decoder), 0)


def test_everything_else_can_be_sliced(decoder: Decoder) -> None:
    world = World(decoder)
    assert all(world.strategy(name).can_be_sliced for name in SLICED)


def test_a_layer_whose_move_failed_is_moved_when_the_slice_runs_again() -> None:
    moved: list[int] = []

    class Once:
        def move(self, layer: int, *_: object) -> None:
            moved.append(layer)
            if len(moved) == 1:
                raise RuntimeError("no memory")

    mover = SliceMover(cast(Drift, Once()), 9, torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(RuntimeError):
        mover.move(1, None, None)  # type: ignore[arg-type]
    for _ in range(2):
        mover.move(1, None, None)  # type: ignore[arg-type]
    assert moved == [1, 1], "again once it failed, never once it was done"
