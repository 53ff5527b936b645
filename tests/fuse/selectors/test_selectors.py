"""Selectors: the contract all of them keep, and each doing what it says on data where one can see.

References are written out densely here; nothing of the scoring code is used to check itself.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvweave.errors import ConfigError, ModelError, RequestError
from kvweave.fuse.encode.extras import INTER, Anchors, choose_anchors, pack_anchors, sink_scores
from kvweave.fuse.fuse import fuse
from kvweave.fuse.needs import Needs
from kvweave.fuse.request import budget
from kvweave.fuse.selector import InFlightChoice, Scene, top_positions
from kvweave.fuse.selectors.cacheblend import CacheBlend
from kvweave.fuse.selectors.cachecraft import CacheCraftLike
from kvweave.fuse.selectors.places import Epic, Random, Stride
from kvweave.fuse.selectors.query_attention import (
    FUSIONRAG_CODE,
    FUSIONRAG_PAPER,
    QueryAttention,
    prophetkv,
    qcfuse,
)
from kvweave.fuse.selectors.strategies import NAMES, default_ratio, open_strategy, split_ratio
from kvweave.fuse.selectors.weave import LATE, weave, weave_deep
from kvweave.fuse.sources import ChunkLost, ComputedChunks
from kvweave.fuse.stitched import Stitched
from kvweave.fuse.strategy import ModelFacts, Strategy, chosen_ratio
from kvweave.kernels.rope import rotate
from kvweave.kv.format.codec import LayerKV
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from worlds.fuse import CHUNKS, QUESTION, SELECTING, World, key_of, make_ids
from worlds.tiny_models import make_model_folder

NUM_LAYERS = 6
SCORING = [  # what declares that it reads or probes something: the others look at positions alone
    name
    for name in SELECTING
    if open_strategy(name, ModelFacts(NUM_LAYERS, (1, 2))).needs(NUM_LAYERS) != Needs()
]
QUERY_AWARE = ["fusionrag", "fusionrag-code", "prophetkv", "qcfuse"]
QUERY_AWARE += ["weave", "weave-deep", "weave-through"]
LONG = make_ids(8, 12, 20, 5, 31, 8)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    root = tmp_path_factory.mktemp("models")
    folder = make_model_folder(root, "llama", num_hidden_layers=NUM_LAYERS)
    return load_decoder(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def world(decoder: Decoder) -> World:
    return World(decoder, chunks=LONG, asked=(1, 4))


def changed(world: World, change: Callable[[int, LayerKV], LayerKV]) -> World:
    """The same world with other stored KV: `change` makes a layer of all placed tokens anew."""
    other = replace(world)
    layers = [change(i, world.source.layer(i)) for i in range(NUM_LAYERS)]
    other.source = ComputedChunks([layers], world.extras)
    return other


def stored_rows(world: World, positions: list[int]) -> Tensor:
    return torch.searchsorted(world.stitched().placed, torch.tensor(positions))


def over_garbage(world: World) -> Stitched:
    """A stitching over a buffer that is full of NaN, still to be laid."""
    kv = world.decoder.new_kv(1)
    stitched = world.stitched(kv)
    for layer in range(NUM_LAYERS):
        kv.keys(layer).fill_(torch.nan)
        kv.values(layer).fill_(torch.nan)
    return stitched


# ── the contract ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ratio", [1e-9, 0.05, 0.15, 0.5, 0.99])
@pytest.mark.parametrize("name", SELECTING)
def test_rows_are_hits_sorted_unique_and_as_many_as_the_budget(
    world: World, name: str, ratio: float
) -> None:
    fused, _ = world.fuse(name, ratio)
    rows, hits = list(fused.recomputed), world.request.hits
    assert rows == sorted(set(rows))
    assert set(rows) <= set(hits)  # no preamble, no exact span, no question
    assert len(rows) == budget(len(hits), ratio)
    taper = world.strategy(name).taper
    last = len(rows) if taper is None else taper.staying(len(rows))
    assert fused.rows_per_layer[-1] == last + len(QUESTION)


@pytest.mark.parametrize(
    ("num_hits", "ratio", "count"),
    [
        (0, 0.0, 0),
        (0, 1.0, 0),
        (100, 0.0, 0),
        (100, 1e-9, 1),
        (100, 0.15, 15),
        (100, 0.29, 29),  # 0.29 * 100 is a little less than 29 in binary
        (100, 0.999, 99),
        (100, 1.0, 100),
        (1, 0.5, 1),
        (7, 0.15, 1),
        (20, 0.15, 3),
    ],
)
def test_budgets(num_hits: int, ratio: float, count: int) -> None:
    assert budget(num_hits, ratio) == count


class Untouchable:
    """A selector that must not be asked."""

    in_flight = False

    def needs(self, num_layers: int) -> Needs:
        return Needs()

    def select(self, scene: Scene, counts: Sequence[int]) -> list[Tensor]:
        raise AssertionError("asked although there is nothing to choose")


class UntouchableInFlight:
    in_flight = True

    def needs(self, num_layers: int) -> Needs:
        return Needs()

    def begin(self, scene: Scene, count: int) -> InFlightChoice:
        raise AssertionError("asked although there is nothing to choose")


@pytest.mark.parametrize("selector", [Untouchable(), UntouchableInFlight()])
def test_ratio_0_ratio_1_and_no_hits_never_reach_a_selector(
    decoder: Decoder, selector: Untouchable | UntouchableInFlight
) -> None:
    single, strategy = World(decoder, chunks=[CHUNKS[0]]), Strategy("any", selector, 0.5)
    for world, ratio in ((World(decoder), 0.0), (World(decoder), 1.0), (single, 0.5)):
        fuse(world.stitched(), strategy, ratio)
    with pytest.raises(AssertionError, match="nothing to choose"):
        fuse(World(decoder).stitched(), strategy, 0.5)


@pytest.mark.parametrize("ratio", [-0.01, 1.01, math.inf, math.nan])
def test_a_ratio_that_is_no_share_is_refused(world: World, ratio: float) -> None:
    with pytest.raises(RequestError, match=r"ratio \S+ is no share; give one from 0 to 1"):
        world.fuse("epic", ratio)


def test_ties_go_to_the_smaller_position() -> None:
    positions = torch.tensor([3, 5, 8, 13, 21])
    assert top_positions(torch.zeros(5), positions, 3).tolist() == [3, 5, 8]
    scores = torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0])
    assert top_positions(scores, positions, 2).tolist() == [5, 8]
    assert top_positions(scores, positions, 4).tolist() == [3, 5, 8, 21]
    assert top_positions(scores, positions, 0).tolist() == []
    extremes = torch.tensor([-math.inf, 0.0, math.inf, -math.inf, 1.0])
    assert top_positions(extremes, positions, 2).tolist() == [8, 21]


def test_many_equal_scores_are_still_taken_in_order() -> None:
    positions = torch.arange(5000)
    scores = (positions % 7 == 0).float()
    want = positions[scores == 1][:500]
    assert torch.equal(top_positions(scores, positions, 500), want)


@pytest.mark.parametrize("name", SCORING)
def test_nan_in_a_score_is_an_error(world: World, name: str) -> None:
    def poison(layer: int, kv: LayerKV) -> LayerKV:
        keys, values = kv.k.clone(), kv.v.clone()
        keys[-1], values[-1] = torch.nan, torch.nan
        return LayerKV(keys, values) if layer else kv

    bad = changed(world, poison)
    inter = {
        span.key: np.full(span.num_tokens, np.nan, np.float16).tobytes()
        for span in world.request.spans
    }
    bad.source = ComputedChunks(
        [[bad.source.layer(i) for i in range(NUM_LAYERS)]], {**world.extras, INTER: inter}
    )
    with pytest.raises(
        ModelError, match="hold NaN: the model or its chunk KV is broken"
    ) as refused:
        bad.fuse(name, 0.2)
    assert "\n" not in str(refused.value)


# ── names ───────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_strategy_is_refused_with_all_known_names() -> None:
    with pytest.raises(RequestError, match="reuse 'magic' is unknown") as refused:
        open_strategy("magic", ModelFacts(6))
    assert all(name in str(refused.value) for name in NAMES)


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(1, (0,)), (2, (1,)), (6, (4, 3, 5)), (30, (18, 17, 19))]
)
def test_qcfuse_without_a_profile_scores_a_little_behind_the_middle(
    num_layers: int, layers: tuple[int, ...]
) -> None:
    opened = open_strategy("qcfuse", ModelFacts(num_layers))
    assert isinstance(opened.selector, QueryAttention)
    assert opened.selector.layers == layers


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("qcfuse:kvzip", "anchors:kvzip"),
        ("qcfuse:sink", "anchors:sink"),
        ("qcfuse:knorm", "anchors:knorm"),
        ("qcfuse:25%", "anchors:kvzip:0.25"),
        ("qcfuse:sink:5%", "anchors:sink:0.05"),
        ("qcfuse:knorm:100%", "anchors:knorm:1"),
    ],
)
def test_rule_and_share_of_anchors_stand_behind_qcfuses_name(name: str, extra: str) -> None:
    opened = open_strategy(name, ModelFacts(6, (4, 2)))
    assert (opened.name, opened.ratio, default_ratio(name)) == (name, 0.5, 0.5)
    assert opened.needs(6) == Needs("anchors", 4, (2, 4), extras=(extra,))


@pytest.mark.parametrize("name", ["qcfuse:best", "qcfuse:0%", "qcfuse:101%", "qcfuse:5%:sink"])
def test_what_no_anchors_are_chosen_by_is_unknown(name: str) -> None:
    with pytest.raises(RequestError, match=f"reuse '{name}' is unknown"):
        open_strategy(name, ModelFacts(6))


def test_epic_with_a_number_recomputes_so_many_first_tokens_of_every_chunk(world: World) -> None:
    for k in (2, 16, 99):
        fused, _ = world.fuse(f"epic:{k}", 0.0)
        spans = world.scene().fused
        first = [range(s.start, min(s.end, s.start + k)) for s in spans]
        assert list(fused.recomputed) == [at for run in first for at in run]


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("weave", ("weave", None)),
        ("weave:0.15", ("weave", "0.15")),
        ("weave:", ("weave", "")),
        ("epic:1", ("epic", "1")),
        ("epic:16", ("epic:16", None)),
        ("qcfuse:sink:20%", ("qcfuse:sink:20%", None)),
        ("qcfuse:sink:0.3", ("qcfuse:sink", "0.3")),
        ("magic:0.3", ("magic", "0.3")),
    ],
)
def test_a_ratio_behind_a_name_is_told_from_the_parts_of_the_name(
    text: str, split: tuple[str, str | None]
) -> None:
    assert split_ratio(text) == split


def test_a_strategy_of_fixed_size_takes_no_ratio() -> None:
    opened = open_strategy("epic:16", ModelFacts(6))
    assert chosen_ratio(opened, None) == 0.0
    with pytest.raises(RequestError, match="reuse 'epic:16' takes no ratio"):
        chosen_ratio(opened, 0.3)


def test_qcfuse_refuses_the_profile_of_a_deeper_model() -> None:
    with pytest.raises(ConfigError, match=r"layer 20 is beyond the 6 layers .* calibrate layers"):
        open_strategy("qcfuse", ModelFacts(6, (3, 20)))


def test_strategies_keep_their_names_and_default_ratios() -> None:
    facts = ModelFacts(NUM_LAYERS, (2, 4, 1, 3))
    opened = {name: open_strategy(name, facts) for name in NAMES}
    assert {name: s.name for name, s in opened.items()} == {name: name for name in NAMES}
    kept = {"full": 0.0, "prefix": 0.0, "reuse": 0.0, "cachecraft-like": 0.3, "prophetkv": 0.2}
    kept |= {"qcfuse": 0.5, "weave": 0.15, "weave-deep": 0.15, "epic": 0.15, "fusionrag": 0.15}
    kept |= {"cacheblend": 0.15, "kvshare-like": 0.15}
    assert {name: opened[name].ratio for name in kept} == kept
    assert [n for n, s in opened.items() if s.drift] == ["weave", "weave-deep", "weave-through"]
    assert [opened[n].reuses for n in ("full", "prefix", "reuse")] == ["none", "exact", "all"]
    assert [n for n, s in opened.items() if s.selector is None] == ["full", "prefix", "reuse"]


def test_selectors_say_what_they_need() -> None:
    facts = ModelFacts(NUM_LAYERS, (4, 2, 1, 3))
    needs = {name: open_strategy(name, facts).needs(NUM_LAYERS) for name in NAMES}
    every = tuple(range(NUM_LAYERS))
    assert all(needs[n] == Needs() for n in ("full", "prefix", "reuse", "random", "stride", "epic"))
    assert needs["cacheblend"] == Needs(value_layers=(1,), full_width_layers=1)
    assert needs["cacheblend-k"] == Needs(key_layers=(1,), full_width_layers=1)
    assert needs["cacheblend-gradual"] == Needs(value_layers=(1, 2, 4), full_width_layers=1)
    assert needs["kvshare-like"] == Needs(value_layers=(1,), full_width_layers=1)
    assert needs["cachecraft-like"] == Needs(extras=("inter",))
    assert needs["fusionrag"] == Needs("question", 5, (5,), probes_ahead=True)
    assert needs["fusionrag-code"] == Needs("question", 5, (5,)), "from position 0 on"
    assert needs["prophetkv"] == Needs("full", 5, every)
    assert needs["qcfuse"] == Needs("anchors", 4, (1, 2, 4), extras=("anchors:kvzip",))
    assert needs["weave"] == Needs("preamble", 4, (4,), probes_ahead=True)
    assert needs["weave-deep"] == needs["weave-through"] == Needs("full", 4, (4,))


# ── positions alone ─────────────────────────────────────────────────────────────────────────────


def test_epic_takes_the_same_share_of_every_chunks_head(world: World) -> None:
    scene = world.scene()
    spans, total = scene.fused, len(scene.hits)
    assert [span.num_tokens for span in spans] == [20, 5, 31, 8]
    for count in range(1, total):
        rows = set(Epic().select(scene, (count,))[0].tolist())
        assert len(rows) == count
        for span in spans:
            own = sorted(rows & set(range(span.start, span.end)))
            assert own == list(range(span.start, span.start + len(own)))  # a head, no gap
            assert abs(len(own) - count * span.num_tokens / total) < 1


def test_epic_gives_what_is_left_to_the_largest_remainders(world: World) -> None:
    spans = world.scene().fused
    rows = Epic().select(world.scene(), (10,))[0].tolist()  # 3.125, 0.78, 4.84, 1.25 of 10
    assert [sum(s.start <= r < s.end for r in rows) for s in spans] == [3, 1, 5, 1]


def test_stride_takes_every_nth_row(decoder: Decoder) -> None:
    scene = World(decoder, chunks=make_ids(1, 5, 20)).scene()
    first = scene.request.spans[1].start
    assert Stride().select(scene, (5,))[0].tolist() == [first + i for i in (0, 4, 8, 12, 16)]
    assert Stride().select(scene, (3,))[0].tolist() == [first + i for i in (0, 6, 13)]
    for count in range(1, 20):
        assert len(set(Stride().select(scene, (count,))[0].tolist())) == count


def test_random_rows_are_fixed_by_the_prompt_and_the_seed(decoder: Decoder, world: World) -> None:
    scene = world.scene()
    rows = Random().select(scene, (20,))[0]
    assert torch.equal(rows, Random().select(world.scene(), (20,))[0])
    assert not torch.equal(rows, Random(seed=1).select(scene, (20,))[0])
    asked_otherwise = replace(world, question=[*QUESTION[:-1], QUESTION[-1] ^ 1]).scene()
    assert torch.equal(asked_otherwise.hits, scene.hits)
    assert not torch.equal(rows, Random().select(asked_otherwise, (20,))[0])


def test_random_rows_are_spread_evenly(world: World) -> None:
    scene = world.scene()
    seen = torch.zeros(len(world.request.prompt_ids))
    for seed in range(400):
        seen[Random(seed).select(scene, (16,))[0]] += 1
    expected = 400 * 16 / len(scene.hits)
    assert seen[scene.hits].min() > 0.6 * expected
    assert seen[scene.hits].max() < 1.4 * expected


# ── deviation ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("signal", "planted"), [("v", "v"), ("k", "k"), ("kv", "v"), ("kv", "k")])
def test_cacheblend_finds_the_rows_with_planted_deviation(
    world: World, signal: str, planted: str
) -> None:
    hits = world.request.hits
    rows = [hits[i] for i in (3, 4, 17, 40, 63)]
    at = stored_rows(world, rows)

    def plant(layer: int, kv: LayerKV) -> LayerKV:
        keys, values = kv.k.clone(), kv.v.clone()
        (keys if planted == "k" else values)[at] += 50.0 * (layer == 1)
        return LayerKV(keys, values)

    strategy = replace(world.strategy("cacheblend"), selector=CacheBlend(signal))  # type: ignore[arg-type]
    fused, _ = changed(world, plant).fuse(strategy, len(rows) / len(hits))
    assert list(fused.recomputed) == rows


@pytest.mark.parametrize("name", ["cacheblend", "cacheblend-k"])
def test_cacheblend_ignores_what_it_does_not_look_at(world: World, name: str) -> None:
    """Deviation elsewhere (other layers, the other signal) changes no choice."""

    def plant(layer: int, kv: LayerKV) -> LayerKV:
        keys, values = kv.k.clone(), kv.v.clone()
        if layer != 1 or name == "cacheblend":
            keys[20:25] += 50.0
        if layer != 1 or name == "cacheblend-k":
            values[20:25] += 50.0
        return LayerKV(keys, values)

    assert (
        changed(world, plant).fuse(name, 0.2)[0].recomputed == world.fuse(name, 0.2)[0].recomputed
    )


def deviation_by_hand(world: World, layer: int, signal: str) -> Tensor:
    """[H] squared change of full prefill against what is stitched. Only right at layer 1."""
    full, laid = world.full, world.laid_by_hand()
    hits = world.request.hits
    pairs = {
        "v": (full.values[layer], laid.values(layer)),
        "k": (full.keys[layer], laid.keys(layer)),
    }
    return sum(((pairs[s][0] - pairs[s][1])[hits] ** 2).sum((1, 2)) for s in signal)  # type: ignore[return-value]


def best(scores: Tensor, world: World, count: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))[:count]
    return sorted(world.request.hits[i] for i in order)


@pytest.mark.parametrize("signal", ["v", "k", "kv"])
def test_cacheblend_ranks_by_deviation_at_layer_1(world: World, signal: str) -> None:
    strategy = replace(world.strategy("cacheblend"), selector=CacheBlend(signal))  # type: ignore[arg-type]
    fused, _ = world.fuse(strategy, 0.25)
    want = best(deviation_by_hand(world, 1, signal), world, budget(len(world.request.hits), 0.25))
    assert list(fused.recomputed) == want


def test_gradual_filtering_shrinks_and_says_what_it_cost(world: World) -> None:
    hits, asked = len(world.request.hits), len(QUESTION)
    fused, _ = world.fuse("cacheblend-gradual", 0.25)
    count = budget(hits, 0.25)
    assert count == 16
    assert fused.rows_per_layer == tuple(n + asked for n in (hits, hits, 24, 20, 20, 16))
    # each step keeps some of the step before: first the 24 that deviate most at layer 1
    coarse = best(deviation_by_hand(world, 1, "v"), world, 24)
    assert set(fused.recomputed) <= set(coarse)
    plain, _ = world.fuse("cacheblend", 0.25)
    assert plain.rows_per_layer == tuple(n + asked for n in (hits, hits, 16, 16, 16, 16))


@pytest.mark.parametrize("num_layers", [3, 4, 5])
def test_gradual_filtering_keeps_the_budget_of_a_shallow_model(
    tmp_path: Path, num_layers: int
) -> None:
    """Its last check may lie beyond the model; then an earlier one leaves the budget."""
    folder = make_model_folder(tmp_path, "llama", num_hidden_layers=num_layers)
    shallow = World(load_decoder(folder, device="cpu", dtype="float32"), chunks=LONG)
    fused, _ = shallow.fuse("cacheblend-gradual", 0.25)
    assert len(fused.recomputed) == budget(len(shallow.request.hits), 0.25) == 16


def test_check_layers_that_make_no_sense_are_our_own_bug() -> None:
    for checks in (((0, 1.0),), ((2, 1.0), (1, 1.0)), ((1, 1.0), (2, 1.5))):
        with pytest.raises(AssertionError):
            CacheBlend("v", checks)


def test_kvshare_like_weighs_deviation_with_attention_at_layer_0(world: World) -> None:
    """Dense attention of all running rows over all keys, in float64."""
    full, request, decoder = world.full, world.request, world.decoder
    rows = torch.tensor([*request.hits, *request.must_compute])
    q = decoder.qkv(0, decoder.embed(torch.tensor(request.prompt_ids)[rows])).q
    q = rotate(q, decoder.angles(rows)).double()
    keys = full.keys[0].double().repeat_interleave(q.shape[1] // full.keys[0].shape[1], dim=1)
    logits = torch.einsum("rhd,nhd->hrn", q, keys) / math.sqrt(q.shape[-1])
    hidden = torch.arange(len(keys)) > rows[:, None]
    mass = logits.masked_fill(hidden, -torch.inf).softmax(-1).sum((0, 1))
    scores = deviation_by_hand(world, 1, "v") * mass[request.hits]
    fused, _ = world.fuse("kvshare-like", 0.25)
    assert list(fused.recomputed) == best(scores, world, budget(len(request.hits), 0.25))
    assert fused.recomputed != world.fuse("cacheblend", 0.25)[0].recomputed


def test_kvshare_like_counts_the_keys_of_missing_chunks(decoder: Decoder) -> None:
    """A miss has no stitched key at layer 0; its fresh one takes part, garbage never does."""
    gap = World(decoder, chunks=LONG, missing={2})
    stitched = over_garbage(gap)
    fused = fuse(stitched, gap.strategy("kvshare-like"), 0.25)
    assert fused.recomputed == gap.fuse("kvshare-like", 0.25)[0].recomputed
    assert bool(fused.logits.isfinite().all())


# ── stored beside the chunk KV ──────────────────────────────────────────────────────────────────


def test_cachecraft_takes_the_rows_with_most_attention_outside(decoder: Decoder) -> None:
    inter = {key_of(c): np.zeros(len(c), np.float16) for c in LONG}
    inter[key_of(LONG[0])][:] = 9.0  # exact: no candidate
    inter[key_of(LONG[1])][[4, 19]] = 3.0
    inter[key_of(LONG[3])][[0, 30]] = [2.0, 5.0]
    blobs = {INTER: {key: each.tobytes() for key, each in inter.items()}}
    world = World(decoder, chunks=LONG, extras=blobs)
    _, one, _, three, _ = world.request.spans
    rows = CacheCraftLike().select(world.scene(), (4,))[0]
    assert rows.tolist() == [one.start + 4, one.start + 19, three.start, three.start + 30]
    five = CacheCraftLike().select(world.scene(), (5,))[0].tolist()
    assert set(five) - set(rows.tolist()) == {one.start}  # a tie among zeros


@pytest.mark.parametrize("name", ["cachecraft-like", "qcfuse"])
def test_chunks_without_what_must_lie_beside_their_kv_are_lost(decoder: Decoder, name: str) -> None:
    whole = World(decoder, chunks=LONG)
    keys = [span.key for span in whole.request.placed]
    for keep in (1, 3):
        extras = {n: dict(list(each.items())[:keep]) for n, each in whole.extras.items()}
        with pytest.raises(ChunkLost) as lost:
            World(decoder, chunks=LONG, extras=extras).fuse(name, 0.3)
        assert lost.value.keys == tuple(keys[keep:])


def test_inter_attention_of_another_length_is_not_used(world: World) -> None:
    blobs, key = dict(world.extras[INTER]), world.request.spans[2].key
    blobs[key] += bytes(2)
    with pytest.raises(ChunkLost) as lost:
        replace(world, extras={INTER: blobs}).fuse("cachecraft-like", 0.3)
    assert lost.value.keys == (key,)


# ── the question's attention ────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def question_states(
    world: World, context: bool | int, start: int | None = None, rows: range | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Turned q and k of the question at every layer, over stitched KV, its first `context` tokens
    or alone; dense."""
    decoder, request = world.decoder, world.request
    rows = rows or range(request.question_start, len(request.prompt_ids))
    at = torch.tensor(rows) if start is None else torch.arange(start, start + len(rows))
    angles, laid = decoder.angles(at), world.laid_by_hand()
    h = decoder.embed(torch.tensor([request.prompt_ids[i] for i in rows]))
    unseen = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
    states = []
    for layer in range(NUM_LAYERS):
        q, k, v = decoder.qkv(layer, h)
        q, k = rotate(q, angles), rotate(k, angles)
        states.append((q, k))
        end = request.question_start if context is True else int(context)
        keys = torch.cat([laid.keys(layer)[:end], k])
        values = torch.cat([laid.values(layer)[:end], v])
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        logits = torch.einsum("rhd,nhd->hrn", q, keys) / math.sqrt(q.shape[-1])
        logits[..., end:].masked_fill_(unseen, -torch.inf)
        h = decoder.finish(layer, h, torch.einsum("hrn,nhd->rhd", logits.softmax(-1), values))
    return states


def attention(
    world: World, q: Tensor, k: Tensor, keys: Tensor, asked: slice, normaliser: str
) -> Tensor:
    """[Hq, asked rows, T] over keys [T] of everything before the question, in float64."""
    request = world.request
    group = q.shape[1] // k.shape[1]

    def logits(some: Tensor) -> Tensor:
        some = some.double().repeat_interleave(group, dim=1)
        return torch.einsum("rhd,nhd->hrn", q.double(), some) / math.sqrt(q.shape[-1])

    unseen = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    context, own = logits(keys), logits(k).masked_fill(unseen, -torch.inf)
    if normaliser == "full":
        p = torch.cat([context, own], dim=-1).softmax(-1)[..., : len(keys)]
    else:
        p = torch.zeros_like(context)
        whole = [(request.preamble_len, request.question_start)]
        spans = [(s.start, s.end) for s in request.spans] if normaliser == "chunk" else whole
        for start, end in spans:
            p[..., start:end] = context[..., start:end].softmax(-1)
    return p[:, asked]


ASKED = slice(1, 4)


def test_prophetkv_sums_attention_over_the_full_context_and_all_layers(world: World) -> None:
    laid, end = world.laid_by_hand(), world.request.question_start
    want = torch.zeros(end, dtype=torch.float64)
    for layer, (q, k) in enumerate(question_states(world, context=True)):
        p = attention(world, q, k, laid.keys(layer)[:end], ASKED, "full")
        want += p.sum((0, 1))
    ours = prophetkv(NUM_LAYERS).scores(world.scene())
    torch.testing.assert_close(ours.double(), want[world.request.hits], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preamble", [[], [1, 2, 3]])
@pytest.mark.parametrize("deep", [False, True])
def test_weave_looks_from_the_whole_question_at_the_chunks_two_thirds_up(
    decoder: Decoder, deep: bool, preamble: list[int]
) -> None:
    """Over the preamble or the full context, and by score per cost."""
    world = World(decoder, preamble=preamble, chunks=LONG, asked=(1, 4))
    laid, end = world.laid_by_hand(), world.request.question_start
    states = question_states(world, context=deep or len(preamble))
    q, k = states[4]
    seen = attention(world, q, k, laid.keys(4)[:end], slice(0, len(QUESTION)), "context")
    cost = 1 + LATE * torch.arange(end) / len(world.request.prompt_ids)
    want = seen.sum((0, 1)) / cost
    ours = (weave_deep if deep else weave)(NUM_LAYERS).scores(world.scene())
    torch.testing.assert_close(ours.double(), want[world.request.hits], atol=1e-4, rtol=1e-4)


def test_weave_searches_in_a_sixth_of_the_layers_from_two_thirds_on() -> None:
    assert [weave(n).layers for n in (1, 2, 3, 6)] == [(0,), (1,), (2,), (4,)]
    assert weave(30).layers == (20, 21, 22, 23, 24)
    assert weave_deep(32).layers == (22, 23, 24, 25, 26)


def test_of_rows_looked_at_alike_the_cheaper_one_is_recomputed(world: World) -> None:
    """Every stored key is the same and turned by nothing the question sees: only cost differs."""
    selector = replace(weave(NUM_LAYERS), late=1.0)
    scene = changed(world, lambda _, kv: LayerKV(torch.zeros_like(kv.k), kv.v)).scene()
    plain = replace(selector, late=0.0).scores(scene)
    torch.testing.assert_close(plain, plain[:1].expand_as(plain))
    assert selector.select(scene, (7,))[0].tolist() == scene.hits[:7].tolist()
    assert bool((selector.scores(scene).diff() < 0).all())


def test_fusionrag_probes_the_question_alone_and_scores_each_chunk_by_itself(
    world: World,
) -> None:
    laid, end = world.laid_by_hand(), world.request.question_start
    q, k = question_states(world, context=False)[-1]
    want = attention(world, q, k, laid.keys(NUM_LAYERS - 1)[:end], ASKED, "chunk").sum((0, 1))
    ours = FUSIONRAG_PAPER.scores(world.scene())
    torch.testing.assert_close(ours.double(), want[world.request.hits], atol=1e-4, rtol=1e-4)
    for span in world.request.spans[1:]:  # the same mass for every chunk
        own = torch.isin(world.scene().hits, torch.arange(span.start, span.end))
        assert float(ours[own].sum()) == pytest.approx(3 * 4, abs=1e-3)


def test_fusionrags_code_scores_at_encoding_positions(world: World) -> None:
    """The user's words at positions 0.., each chunk right behind the preamble."""
    request, layer = world.request, NUM_LAYERS - 1
    q, k = question_states(world, context=False, start=0, rows=request.asked)[layer]
    keys = torch.zeros(request.question_start, *k.shape[1:])
    for span, made in zip(request.spans, world.made, strict=True):
        at = torch.arange(request.preamble_len, request.preamble_len + span.num_tokens)
        keys[span.start : span.end] = rotate(made[layer].k, world.decoder.angles(at))
    want = attention(world, q, k, keys, slice(None), "chunk").sum((0, 1))
    ours = FUSIONRAG_CODE.scores(world.scene())
    torch.testing.assert_close(ours.double(), want[request.hits], atol=1e-4, rtol=1e-4)


def test_fusionrag_as_written_and_as_coded_differ_in_positions_alone(decoder: Decoder) -> None:
    assert replace(FUSIONRAG_PAPER, keys_at="encoding") == FUSIONRAG_CODE
    orders = [[0, 1, 2, 3, 4], [0, 3, 4, 1, 2]]
    worlds = [World(decoder, chunks=[LONG[i] for i in order], extras={}) for order in orders]

    def by_chunk(selector: QueryAttention, world: World) -> dict[bytes, Tensor]:
        scores = selector.scores(world.scene())
        cuts = scores.split([span.num_tokens for span in world.scene().fused])
        return {span.key: cut for span, cut in zip(world.scene().fused, cuts, strict=True)}

    (code, code_moved), (paper, paper_moved) = (
        [by_chunk(s, w) for w in worlds] for s in (FUSIONRAG_CODE, FUSIONRAG_PAPER)
    )
    for key in code:  # position-free scores against true distances
        torch.testing.assert_close(code[key], code_moved[key], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(paper[key], paper_moved[key], atol=1e-4)


def anchored(world: World, share: float) -> World:
    """The same world with anchors that are a share of every chunk."""
    blobs = {}
    for span, made in zip(world.request.placed, world.made, strict=True):
        anchors = choose_anchors(made, sink_scores(made), share)
        if share == 0.0:
            empty = made[0].k[None, :0].expand(NUM_LAYERS, -1, -1, -1)
            anchors = Anchors(torch.zeros(NUM_LAYERS, 0, dtype=torch.int64), empty, empty)
        blobs[span.key] = pack_anchors(anchors)
    return replace(world, extras={"anchors:kvzip": blobs})


def anchors_like(selector: QueryAttention) -> QueryAttention:
    return replace(selector, view="anchors")


@pytest.mark.parametrize("preamble", [[], [1, 2, 3]])
def test_anchors_that_are_all_tokens_make_prophetkv(decoder: Decoder, preamble: list[int]) -> None:
    whole = anchored(World(decoder, preamble=preamble, chunks=LONG), 1.0)
    full, ours = prophetkv(NUM_LAYERS), anchors_like(prophetkv(NUM_LAYERS))
    scores = [s.scores(whole.scene()) for s in (full, ours)]
    torch.testing.assert_close(scores[1], scores[0], atol=2e-2, rtol=2e-2)  # anchors are float16
    few = anchored(whole, 0.1)
    assert not torch.allclose(ours.scores(few.scene()), scores[0], atol=5e-2, rtol=5e-2)


def test_no_anchors_and_no_preamble_leave_the_question_alone(decoder: Decoder) -> None:
    for preamble in ([], [1, 2, 3]):
        none = anchored(World(decoder, preamble=preamble, chunks=LONG), 0.0)
        alone, ours = FUSIONRAG_PAPER, anchors_like(FUSIONRAG_PAPER)
        scores = [s.scores(none.scene()) for s in (alone, ours)]
        # the preamble is always seen whole, so with one the limit is another
        assert torch.allclose(scores[0], scores[1], atol=1e-5) is (preamble == [])


def test_anchors_stand_at_their_true_positions(decoder: Decoder) -> None:
    """Three anchors of each chunk seen densely at the positions they have in the prompt."""
    world = anchored(World(decoder, chunks=LONG, asked=(1, 4)), 0.3)
    request, laid = world.request, world.laid_by_hand()
    seen = list(range(request.preamble_len))
    for span in request.spans:
        seen += range(span.start, span.start + math.ceil(0.3 * span.num_tokens))
    hidden = torch.ones(request.question_start, dtype=torch.bool)
    hidden[seen] = False
    at = torch.arange(request.question_start, len(request.prompt_ids))
    angles = decoder.angles(at)
    h = decoder.embed(torch.tensor(request.prompt_ids)[at])
    unseen = torch.ones(len(at), len(at), dtype=torch.bool).triu(1)
    want = torch.zeros(request.question_start, dtype=torch.float64)
    with torch.inference_mode():
        for layer in range(3):
            q, k, v = decoder.qkv(layer, h)
            q, k = rotate(q, angles), rotate(k, angles)
            front = laid.keys(layer)[: request.question_start]
            if layer in (1, 2):
                want += attention(world, q, k, front, ASKED, "full").mean((0, 1))
            keys = torch.cat([front, k]).repeat_interleave(2, dim=1)
            values = torch.cat([laid.values(layer)[: request.question_start], v])
            logits = torch.einsum("rhd,nhd->hrn", q, keys) / math.sqrt(q.shape[-1])
            logits[..., : request.question_start].masked_fill_(hidden, -torch.inf)
            logits[..., request.question_start :].masked_fill_(unseen, -torch.inf)
            o = torch.einsum("hrn,nhd->rhd", logits.softmax(-1), values.repeat_interleave(2, dim=1))
            h = decoder.finish(layer, h, o)
    ours = qcfuse([2, 1]).scores(world.scene())
    torch.testing.assert_close(ours.double(), want[request.hits], atol=2e-3, rtol=2e-2)


def test_qcfuse_takes_the_three_best_layers_of_the_profile() -> None:
    assert qcfuse([4, 2, 5, 1]).layers == (4, 2, 5)
    assert qcfuse([3]).layers == (3,)


@pytest.mark.parametrize("view", ["question", "preamble", "anchors", "full"])
def test_a_probe_needs_nothing_of_the_layers_above_the_scored_one(world: World, view: str) -> None:
    selector = QueryAttention(view=view, layers=(2,))  # type: ignore[arg-type]
    nan = torch.tensor(torch.nan)

    def poison(layer: int, kv: LayerKV) -> LayerKV:
        keys = kv.k if layer <= 2 else kv.k + nan
        return LayerKV(keys, kv.v if layer < 2 else kv.v + nan)

    scene = changed(world, poison).scene()
    assert torch.equal(selector.select(scene, (12,))[0], selector.select(world.scene(), (12,))[0])


def test_missing_chunks_are_neither_seen_nor_scored(decoder: Decoder) -> None:
    """Whatever lies in the buffer where a chunk is missing changes no choice."""
    gap = World(decoder, chunks=LONG, missing={2}, asked=(1, 4))
    for name in QUERY_AWARE:
        stitched = over_garbage(gap)
        fused = fuse(stitched, replace(gap.strategy(name), taper=None), 0.3)
        assert fused.recomputed == gap.fuse(name, 0.3)[0].recomputed
        assert bool(fused.logits.isfinite().all())


@pytest.mark.parametrize("name", QUERY_AWARE)
def test_another_question_chooses_other_rows(world: World, name: str) -> None:
    other = replace(world, question=[(i + 40) % 97 for i in QUESTION])
    assert world.fuse(name, 0.2)[0].recomputed != other.fuse(name, 0.2)[0].recomputed


@pytest.mark.parametrize("name", ["random", "stride", "epic", "cachecraft-like"])
def test_what_depends_on_no_tensor_depends_on_no_model(
    world: World, name: str, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path, "qwen3")
    other = replace(world, decoder=load_decoder(folder, device="cpu", dtype="float32"))
    assert other.fuse(name, 0.3)[0].recomputed == world.fuse(name, 0.3)[0].recomputed
