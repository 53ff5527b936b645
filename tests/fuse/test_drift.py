"""Drift: the rest of a chunk follows its recomputed rows by the documented part, and only it."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvweave.fuse import drift
from kvweave.fuse.drift import DOUBT, Drift
from kvweave.fuse.fused_pass import fused_pass
from kvweave.fuse.pass_tables import PassTables
from kvweave.fuse.request import State
from kvweave.kernels.rope import Angles, rotate
from kvweave.kv.format.codec import LayerKV
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.rows import QKV
from kvweave.model.sequence_kv import SequenceKV
from worlds.fuse import World, assert_same_kv, make_ids, prefilled
from worlds.tiny_models import make_model_folder

LAYER, STRENGTH = 1, 0.5
CHUNKS = make_ids(6, 8, 12, 10, 9)


@pytest.fixture(scope="module", params=["llama", "llama-yarn", "qwen3"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = make_model_folder(tmp_path_factory.mktemp("models"), request.param)
    decoder: Decoder = load_decoder(folder, device="cpu", dtype="float32")
    return World(decoder, chunks=CHUNKS, missing={3}, extras={})


@dataclass
class Moved:
    """One layer before and after drift, with a change planted into the running rows."""

    before: LayerKV
    after: LayerKV
    change: LayerKV  # [1, Hk, D] planted, keys before RoPE


def move(
    world: World,
    chosen: list[int],
    layer: int = LAYER,
    noise: float = 0.0,
    strength: float = 0.5,
) -> Moved:
    decoder, request = world.decoder, world.request
    kv: SequenceKV = decoder.new_kv(1)
    stitched = world.stitched(kv)
    stitched.layers.lay(layer)
    g = torch.Generator().manual_seed(1)
    shape = (1, decoder.spec.num_kv_heads, decoder.spec.head_dim)
    change = LayerKV(torch.randn(shape, generator=g), torch.randn(shape, generator=g))
    rows = torch.tensor(sorted({*chosen, *request.must_compute}))
    # fresh rows are the stored ones and the planted vector; garbage where nothing is stored
    fresh_k, fresh_v = torch.randn(2, len(rows), *shape[1:], generator=g)
    for i, position in enumerate(rows.tolist()):
        if position in chosen:
            at = int(torch.searchsorted(stitched.placed, position))
            sway = noise * (1 if chosen.index(position) % 2 else -1)
            stored = stitched.layers.unturned_kv(layer)
            fresh_k[i] = stored.k[at] + change.k[0] + sway
            fresh_v[i] = stored.v[at] + change.v[0] + sway
    before = LayerKV(kv.keys(layer).clone(), kv.values(layer).clone())
    fresh = QKV(fresh_k, fresh_k, fresh_v)
    Drift(decoder, request, chosen, strength).move(layer, rows, fresh, kv)
    return Moved(before, LayerKV(kv.keys(layer), kv.values(layer)), change)


def turned(world: World, vector: Tensor, positions: range) -> Tensor:
    """A planted key change as it shows at each position."""
    angles = world.decoder.angles(torch.tensor(list(positions)))
    each = zip(angles.cos, angles.sin, strict=True)
    return torch.cat([rotate(vector, Angles(cos[None], sin[None])) for cos, sin in each])


def span_range(world: World, number: int) -> range:
    return range(world.request.spans[number].start, world.request.spans[number].end)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("strength", [0.5, 0.9])
def test_a_chunk_follows_a_shared_change_by_the_documented_part(
    world: World, count: int, strength: float
) -> None:
    place = span_range(world, 1)
    moved = move(world, list(place)[1 : 1 + count], strength=strength)
    part = strength * count / (count + DOUBT)
    want_k = moved.before.k[place] + part * turned(world, moved.change.k, place)
    want_v = moved.before.v[place] + part * moved.change.v
    rest = [p - place.start for p in place if p - place.start not in range(1, 1 + count)]
    torch.testing.assert_close(moved.after.k[place][rest], want_k[rest], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved.after.v[place][rest], want_v[rest], atol=1e-5, rtol=1e-5)


def test_the_mean_of_the_recomputed_rows_counts(world: World) -> None:
    """Changes that point both ways cancel out and leave what all rows share."""
    place = span_range(world, 1)
    chosen = list(place)[2:6]
    calm, swaying = move(world, chosen), move(world, chosen, noise=3.0)
    torch.testing.assert_close(swaying.after.k[place], calm.after.k[place], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(swaying.after.v[place], calm.after.v[place], atol=1e-4, rtol=1e-4)


def test_only_chunks_with_recomputed_rows_move(world: World) -> None:
    place = span_range(world, 1)
    moved = move(world, list(place)[:3])
    states = [span.state for span in world.request.spans]
    assert states == [State.EXACT, State.REUSED, State.REUSED, State.COMPUTED]
    others = [p for p in range(len(world.request.prompt_ids)) if p not in place]
    known = [p for p in others if p < world.request.spans[3].start]  # preamble, exact, the other
    assert torch.equal(moved.after.k[known], moved.before.k[known])
    assert torch.equal(moved.after.v[known], moved.before.v[known])
    assert not torch.allclose(moved.after.v[place], moved.before.v[place], atol=1e-2)


def test_an_exact_chunk_never_moves(world: World) -> None:
    """Not even if a row of it is recomputed."""
    moved = move(world, [span_range(world, 0)[2], span_range(world, 1)[2]])
    exact = span_range(world, 0)
    assert torch.equal(moved.after.k[exact], moved.before.k[exact])
    assert torch.equal(moved.after.v[exact], moved.before.v[exact])


def test_every_chunk_moves_by_its_own_rows(world: World) -> None:
    one, two = span_range(world, 1), span_range(world, 2)
    moved = move(world, [one[3], two[0], two[4], two[5]])
    for place, count in ((one, 1), (two, 3)):
        part = STRENGTH * count / (count + DOUBT)
        want = moved.before.v[place] + part * moved.change.v
        torch.testing.assert_close(moved.after.v[place], want, atol=1e-5, rtol=1e-5)


def test_layer_0_never_moves(world: World) -> None:
    place = span_range(world, 1)
    moved = move(world, list(place)[:3], layer=0)
    known = slice(0, world.request.spans[3].start)
    assert torch.equal(moved.after.k[known], moved.before.k[known])
    assert torch.equal(moved.after.v[known], moved.before.v[known])


def test_recomputed_rows_are_not_moved_by_the_pass(world: World) -> None:
    """With and without drift, computed rows of layer 1 are the same; the rest of a chunk is not."""
    decoder, request = world.decoder, world.request
    place = span_range(world, 1)
    chosen = list(place)[2:5]
    rows = sorted({*chosen, *request.must_compute})
    runs = []
    for strength in (None, 0.5):
        kv = decoder.new_kv(1)
        stitched = world.stitched(kv)
        mover = strength and Drift(decoder, request, chosen, strength)
        passed = fused_pass(stitched, rows, drift=mover or None)
        runs.append(prefilled(decoder, passed.logits, kv))
    still, moved = runs
    assert_same_kv(moved, still, layers=[0], tolerance=0.0)
    assert_same_kv(moved, still, rows, layers=[1], tolerance=0.0)
    untouched = [p for p in range(request.spans[3].start) if p not in place]
    assert_same_kv(moved, still, untouched, tolerance=0.0)
    rest = [p for p in place if p not in chosen]
    for layer in range(1, decoder.spec.num_layers):
        assert (moved.keys[layer] - still.keys[layer])[rest].abs().amax() > 1e-3
        assert (moved.values[layer] - still.values[layer])[rest].abs().amax() > 1e-3


def test_a_chunk_that_stands_twice_moves_only_where_rows_were_recomputed(world: World) -> None:
    twice = World(world.decoder, chunks=[CHUNKS[0], CHUNKS[1], CHUNKS[1]], extras={})
    here, there = span_range(twice, 2), span_range(twice, 1)
    moved = move(twice, list(here)[:4])
    assert torch.equal(moved.after.k[there], moved.before.k[there])
    part = STRENGTH * 4 / (4 + DOUBT)
    want = moved.before.k[here] + part * turned(twice, moved.change.k, here)
    torch.testing.assert_close(moved.after.k[here], want, atol=1e-5, rtol=1e-5)


def test_drift_with_nothing_chosen_does_nothing(world: World) -> None:
    moved = move(world, [])
    known = slice(0, world.request.spans[3].start)
    assert torch.equal(moved.after.k[known], moved.before.k[known])


def test_all_chunks_at_once_move_as_run_by_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's few steps and a CPU's runs of rows end in the same KV, layer after layer."""
    chosen = [*list(span_range(world, 1))[1:4], span_range(world, 2)[5]]
    rows = sorted({*chosen, *world.request.must_compute})
    done = []
    for moved in (drift.run_by_run, drift.all_at_once):
        monkeypatch.setattr(drift, "run_by_run", moved)
        kv = world.decoder.new_kv(1)
        mover = Drift(world.decoder, world.request, chosen)
        passed = fused_pass(world.stitched(kv), rows, drift=mover)
        done.append(prefilled(world.decoder, passed.logits, kv))
    torch.testing.assert_close(done[0].logits, done[1].logits, atol=1e-4, rtol=1e-4)
    assert_same_kv(*done)


@pytest.mark.parametrize("all_chunks", [True, False])
def test_tables_made_ahead_of_the_choice_change_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, all_chunks: bool
) -> None:
    """What a GPU has ready while rows are chosen, whether all chunks turn out to move or some."""
    monkeypatch.setattr(drift, "run_by_run", drift.all_at_once)
    moving = (1, 2) if all_chunks else (1,)
    chosen = [position for n in moving for position in list(span_range(world, n))[1:3]]
    rows = sorted({*chosen, *world.request.must_compute})
    tables = PassTables(world.decoder, world.request)
    done = []
    for ahead in (None, tables):
        kv = world.decoder.new_kv(1)
        stitched = world.stitched(kv)
        stitched.tables = ahead
        mover = Drift(world.decoder, world.request, chosen, ahead=ahead)
        passed = fused_pass(stitched, rows, drift=mover)
        done.append(prefilled(world.decoder, passed.logits, kv))
    assert torch.equal(done[0].logits, done[1].logits)
    assert_same_kv(*done)
