"""Two roads, one answer: fusion against full prefill, plain reuse and a pass written in the open.

Every strategy that recomputes, on every family and RoPE variant. Whatever a selector thinks is
important, these hold: all rows recomputed is full prefill, none is plain reuse, layer 0 is free,
and no row ever sees what stands behind it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvweave.fuse.drift import Drift
from kvweave.fuse.encode.chunk_pass import encode_chunks
from kvweave.fuse.encode.contexts import neighbour_prefix
from kvweave.fuse.fused_pass import LayerLook, fused_pass
from kvweave.fuse.request import State, budget
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from worlds.fuse import (
    CHUNKS,
    PREAMBLE,
    SELECTING,
    VOCABULARY,
    Prefilled,
    World,
    assert_same,
    assert_same_kv,
    full_prefill,
    make_ids,
    prefilled,
)
from worlds.tiny_models import VARIANTS, make_model_folder

IN_FLIGHT = [
    "cacheblend",
    "cacheblend-k",
    "cacheblend-gradual",
    "kvshare-like",
]  # all rows run 0 and 1
DENSE = ["llama", "llama-yarn", "qwen2", "qwen3"]


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def any_world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(load(tmp_path_factory.mktemp("models"), request.param))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def world(decoder: Decoder) -> World:
    return World(decoder)


def load(root: Path, variant: str, dtype: str = "float32", **changes: int) -> Decoder:
    return load_decoder(make_model_folder(root, variant, **changes), device="cpu", dtype=dtype)


# ── every strategy on every family ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", SELECTING)
def test_ratio_one_is_full_prefill(any_world: World, name: str) -> None:
    fused, ours = any_world.fuse(name, 1.0)
    assert list(fused.recomputed) == any_world.request.hits
    assert_same(ours, any_world.full)


def test_ratio_zero_is_plain_reuse(any_world: World) -> None:
    want = plain_reuse(any_world)
    for name in [*SELECTING, "reuse"]:
        fused, ours = any_world.fuse(name, 0.0)
        assert fused.recomputed == ()
        assert set(fused.rows_per_layer) == {len(any_world.question)}
        assert_same(ours, want)


@pytest.mark.parametrize("name", SELECTING)
def test_keys_and_values_of_layer_1_are_exact_in_every_computed_row(
    any_world: World, name: str
) -> None:
    fused, ours = any_world.fuse(name, 0.3)
    rows = sorted({*fused.recomputed, *any_world.request.must_compute})
    assert_same_kv(ours, any_world.full, rows, layers=[0, 1])
    assert_same_kv(ours, any_world.full, layers=[0])  # and layer 0 everywhere


@pytest.mark.parametrize("name", [n for n in SELECTING if not n.startswith("weave")])
def test_a_partial_pass_equals_the_pass_in_the_open(any_world: World, name: str) -> None:
    fused, ours = any_world.fuse(name, 0.4)
    request = any_world.request
    rows = sorted({*fused.recomputed, *request.must_compute})
    start = sorted({*request.hits, *request.must_compute}) if name in IN_FLIGHT else rows
    assert fused.rows_per_layer == (len(start), len(start), len(rows))
    assert_same(ours, any_world.dense_pass(start, start, rows))


def test_what_is_exact_stays_exact(any_world: World) -> None:
    """Preamble and first chunk equal full prefill; so does everything, if no other is there."""
    _, ours = any_world.fuse("weave", 0.3)
    end = any_world.request.spans[0].end
    assert any_world.request.spans[0].state is State.EXACT
    assert_same_kv(ours, any_world.full, slice(0, end))
    single = World(any_world.decoder, chunks=[CHUNKS[0]])
    assert single.request.hits == []
    assert_same(single.fuse("weave", 0.3)[1], single.full)


def test_stitched_keys_of_layer_0_equal_exact_ones(any_world: World) -> None:
    stitched, full = any_world.stitched(), any_world.full
    at = torch.cat([torch.arange(len(PREAMBLE)), stitched.placed])
    torch.testing.assert_close(stitched.keys(0)[at], full.keys[0][at], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stitched.values(0)[at], full.values[0][at], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drift", [False, True])
def test_a_later_chunk_never_changes_an_earlier_recomputed_row(
    any_world: World, drift: bool
) -> None:
    before, after = leak_probe(any_world, drift=drift)
    # not bit by bit: experts group other rows, and products round by their shape
    assert_same_kv(before, after, slice(0, any_world.request.spans[3].start), tolerance=1e-5)


ROWS = [8, 9, 17, 20, 30]  # in every chunk but the last


def leak_probe(world: World, drift: bool = False) -> tuple[Prefilled, Prefilled]:
    """The same rows recomputed before two last chunks."""
    changed = [(i + 1) % VOCABULARY for i in world.chunks[3]]
    worlds = [
        replace(world, chunks=[*world.chunks[:3], last], extras={}, first_is_exact=False)
        for last in (world.chunks[3], changed)
    ]
    both = [recompute(w, [*ROWS, w.request.spans[3].start + 2], drift) for w in worlds]
    return both[0], both[1]


def recompute(world: World, chosen: Sequence[int], drift: bool = False) -> Prefilled:
    kv = world.decoder.new_kv(1)
    stitched = world.stitched(kv)
    mover = Drift(world.decoder, world.request, chosen) if drift else None
    rows = sorted({*chosen, *world.request.must_compute})
    passed = fused_pass(stitched, rows, drift=mover)
    return prefilled(world.decoder, passed.logits, kv)


def plain_reuse(world: World) -> Prefilled:
    """The question run by the decoder's own loop behind KV that was laid by hand."""
    kv, rows = world.laid_by_hand(), world.request.must_compute
    ids = [world.request.prompt_ids[i] for i in rows]
    logits = world.decoder.forward([Rows(ids, rows, kv, [len(rows) - 1])])[0]
    return prefilled(world.decoder, logits, kv)


# ── prompts of odd shapes ───────────────────────────────────────────────────────────────────────

SHAPES = {
    "the same chunk twice": {"chunks": [CHUNKS[2], CHUNKS[0], CHUNKS[2]]},
    "the same chunk twice in a row": {"chunks": [CHUNKS[0], CHUNKS[0]]},
    "one-token chunks": {"chunks": [CHUNKS[1], [5], CHUNKS[1], [7]]},
    "a miss in the middle": {"missing": {2}},
    "a miss in front": {"missing": {0}},
    "a miss at the end": {"missing": {3}},
    "hits between misses": {"missing": {0, 2}},
    "an empty preamble": {"preamble": []},
    "an empty preamble and a miss in front": {"preamble": [], "missing": {0}},
    "another order": {"chunks": [CHUNKS[i] for i in (2, 3, 0, 1)]},
    "a first chunk that is not exact": {"first_is_exact": False},
    "a one-token question": {"question": [11]},
    "some words asked": {"asked": (1, 3)},
    "parts longer than a block of rows": {
        "chunks": make_ids(1, 20, 300, 40),
        "question": make_ids(2, 270)[0],
    },
}


@pytest.fixture(scope="module", params=list(SHAPES))
def odd_world(request: pytest.FixtureRequest, decoder: Decoder) -> World:
    return World(decoder, **SHAPES[request.param])  # type: ignore[arg-type]


def test_prompts_of_any_shape_recompute_to_full_prefill(odd_world: World) -> None:
    for name in SELECTING:
        assert_same(odd_world.fuse(name, 1.0)[1], odd_world.full)


def test_prompts_of_any_shape_recompute_what_was_asked_for(odd_world: World) -> None:
    hits = odd_world.request.hits
    for name in SELECTING:
        fused, ours = odd_world.fuse(name, 0.4)
        assert list(fused.recomputed) == sorted(set(fused.recomputed) & set(hits))
        assert len(fused.recomputed) == budget(len(hits), 0.4)
        rows = sorted({*fused.recomputed, *odd_world.request.must_compute})
        assert_same_kv(ours, odd_world.full, rows, layers=[0, 1])
        assert bool(ours.logits.isfinite().all())


def test_prompts_of_any_shape_are_reused_plainly(odd_world: World) -> None:
    assert_same(odd_world.fuse("reuse", 0.0)[1], plain_reuse(odd_world))


@pytest.mark.parametrize("preamble", [PREAMBLE, []])
@pytest.mark.parametrize("name", SELECTING)
def test_without_a_hit_it_is_full_prefill(decoder: Decoder, name: str, preamble: list[int]) -> None:
    nothing = World(decoder, preamble=preamble, missing={0, 1, 2, 3})
    fused, ours = nothing.fuse(name, 0.5)
    assert fused.recomputed == ()
    assert_same(ours, nothing.full)
    bare = World(decoder, preamble=preamble, chunks=[])
    assert_same(bare.fuse(name, 0.5)[1], bare.full)


def test_a_miss_is_computed_over_what_stands_before_it(world: World) -> None:
    """Behind an exact chunk a miss is exact; behind a reused one it sees the stitched KV."""
    gap = World(world.decoder, missing={1, 2})
    exact_until = gap.request.spans[2].end
    _, ours = gap.fuse("reuse", 0.0)
    assert_same_kv(ours, gap.full, slice(0, exact_until))
    late = World(world.decoder, missing={3})
    assert_same(late.fuse("reuse", 0.0)[1], late.dense_pass(late.request.must_compute))


def test_a_chunk_placed_twice_is_turned_to_both_places(decoder: Decoder) -> None:
    twice = World(decoder, chunks=[CHUNKS[0], CHUNKS[2], CHUNKS[0]])
    _, ours = twice.fuse("epic", 0.2)
    first, _, again = twice.request.spans
    assert not torch.allclose(
        ours.keys[0][first.start : first.end], ours.keys[0][again.start : again.end], atol=1e-2
    )
    assert_same_kv(ours, twice.full, layers=[0])


def test_chunks_behind_another_context_are_never_exact(world: World) -> None:
    """KV that was computed behind neighbours is fused, and ratio 1 repairs all of it."""
    decoder = world.decoder
    prefix = neighbour_prefix(decoder, world.prefix, [(CHUNKS[i], world.made[i]) for i in (3, 0)])
    assert prefix.token_ids == (*PREAMBLE, *CHUNKS[3], *CHUNKS[0])
    moved = World(decoder, first_is_exact=False)
    moved.made = encode_chunks(decoder, prefix, CHUNKS)
    moved.source = type(moved.source)(moved.made, moved.extras)
    assert {span.state for span in moved.request.spans} == {State.REUSED}
    assert_same(moved.fuse("epic", 1.0)[1], moved.full)
    assert_same(moved.fuse("reuse", 0.0)[1], plain_reuse(moved))


# ── precision, repeatability, ownership ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("variant", DENSE)
def test_bfloat16_at_ratio_one_is_as_far_from_full_prefill_as_rounding(
    tmp_path: Path, variant: str
) -> None:
    """Both are held to float32: which of two roundings is nearer is a matter of the order in which
    this machine adds, so all rows recomputed may be twice as far off as full prefill is, as a root
    mean square, which no single unlucky number decides."""
    half = World(load(tmp_path, variant, "bfloat16"))
    exact = full_prefill(
        load_decoder(tmp_path / variant, device="cpu", dtype="float32"), half.request.prompt_ids
    )

    def errors(of: Prefilled) -> list[float]:
        """Of logits, keys and values of every layer, in units of what full prefill may be off by:
        its own error, and a rounding of the result at least."""
        ours, theirs, want = (
            [each.logits, *each.keys, *each.values] for each in (of, half.full, exact)
        )
        return [
            rms(a.float() - c) / max(rms(b.float() - c), torch.finfo(torch.bfloat16).eps * rms(c))
            for a, b, c in zip(ours, theirs, want, strict=True)
        ]

    for name in SELECTING:
        assert max(errors(half.fuse(name, 1.0)[1])) <= 2.0, name
    assert max(errors(half.fuse("reuse", 0.0)[1])) > 4.0, "plain reuse is no rounding"


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("variant", DENSE)
def test_bfloat16_fuses_the_rows_it_chose_as_the_pass_in_the_open(
    tmp_path: Path, variant: str
) -> None:
    half = World(load(tmp_path, variant, "bfloat16"))
    for name in ("epic", "fusionrag", "prophetkv", "qcfuse"):
        fused, ours = half.fuse(name, 0.4)
        assert len(fused.recomputed) == budget(len(half.request.hits), 0.4)
        assert ours.keys[0].dtype == torch.bfloat16
        want = half.dense_pass(sorted({*fused.recomputed, *half.request.must_compute}))
        assert_same_kv(ours, want, layers=[0, 1], tolerance=0.1)
        error = (ours.logits.float() - want.logits.float()).abs().max()
        assert float(error) <= 0.05 * float(want.logits.float().abs().max())


@pytest.mark.parametrize("name", SELECTING)
def test_the_same_request_gives_the_same_rows_and_bits(world: World, name: str) -> None:
    (first, ours), (again, theirs) = (World(world.decoder).fuse(name, 0.3) for _ in range(2))
    assert first.recomputed == again.recomputed
    assert torch.equal(first.logits, again.logits)
    assert all(torch.equal(a, b) for a, b in zip(ours.keys, theirs.keys, strict=True))


@pytest.mark.parametrize("name", SELECTING)
def test_chunk_kv_and_preamble_are_never_written(world: World, name: str) -> None:
    layers = range(world.decoder.spec.num_layers)
    shared = [t for i in layers for t in (*world.source.layer(i), *world.prefix.layers[i])]
    before = [t.clone() for t in shared]
    for ratio in (0.0, 0.3, 0.3, 1.0):
        world.fuse(name, ratio)
    assert all(torch.equal(a, b) for a, b in zip(before, shared, strict=True))


def test_decoding_behind_fused_kv_goes_on_from_the_recomputed_rows(world: World) -> None:
    """Replaced originals are gone for good: twelve more tokens equal a dense fused cache's."""
    rows = [*ROWS, *world.request.must_compute]
    kv, start = world.decoder.new_kv(1), len(world.request.prompt_ids)
    fused_pass(world.stitched(kv), rows)
    dense = world.dense_pass(rows)
    other = world.decoder.new_kv(start)
    other.reserve(start)
    for layer in range(world.decoder.spec.num_layers):
        other.keys(layer)[:], other.values(layer)[:] = dense.keys[layer], dense.values[layer]
    ids = list(range(12))
    at = range(start, start + 12)
    logits = [world.decoder.forward([Rows(ids, at, each, range(12))]) for each in (kv, other)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_a_selector_that_narrows_in_flight_writes_all_rows_of_its_check_layer(
    world: World,
) -> None:
    """Rows that are dropped at a check layer leave what they computed there behind."""
    seen: list[LayerLook] = []

    class KeepFirst:
        def narrow(self, look: LayerLook) -> torch.Tensor | None:
            seen.append(look)
            asked = torch.arange(len(look.positions) - len(world.question), len(look.positions))
            return torch.cat([torch.tensor([0]), asked]) if look.layer == 1 else None

    kv, hits = world.decoder.new_kv(1), world.request.hits
    rows = [*hits, *world.request.must_compute]
    passed = fused_pass(world.stitched(kv), rows, in_flight=KeepFirst())
    ours = prefilled(world.decoder, passed.logits, kv)
    assert passed.rows == (hits[0], *world.request.must_compute)
    assert passed.rows_per_layer == (len(rows), len(rows), 1 + len(world.question))
    assert_same_kv(ours, world.full, layers=[0, 1])
    assert_same_kv(ours, plain_reuse(world), hits[1:], layers=[2])
    for look in seen[:2]:
        turned = world.full.keys[look.layer][look.positions]
        torch.testing.assert_close(look.turned_k, turned, atol=1e-4, rtol=1e-4)
