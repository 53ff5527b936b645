"""Fused requests over shared chunks in 8 bits: near what whole ones give, and the same for all."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.page_manager import make_pool
from kvweave.engine.request import EngineRequest
from kvweave.fuse.request import State
from kvweave.model.load import load_decoder
from kvweave.reasons import Reason
from worlds.engine import SMALL, ids, plain
from worlds.fused import CHUNKS, World, answer, at_rest, shuffled
from worlds.tiny_models import make_model_folder

SHARED = replace(SMALL, share_chunks=True, overlap_steps=True)
CODED = replace(SHARED, shared_codec="int8")
LONG = [CHUNKS[2], CHUNKS[0], CHUNKS[3], CHUNKS[2], CHUNKS[1]]  # one chunk twice
SLICED = ["reuse", "weave", "weave-deep", "fusionrag", "epic", "random"]


def thoughts(world: World, cfg: EngineConfig, request: EngineRequest) -> list[torch.Tensor]:
    """Probabilities of every token of an answer, given twice: chunks are brought, and lie there."""
    with Engine(world.decoder, cfg) as engine:
        tickets = []
        for _ in range(2):
            tickets.append(engine.submit(request))
            answer(tickets[-1])
        at_rest(engine, world)
        return [torch.stack(ticket.distributions).exp() for ticket in tickets]


@pytest.mark.parametrize("variant", ["llama", "qwen2-yarn", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_what_the_model_thinks_is_near_that_over_copies(
    tmp_path: Path, variant: str, dtype: str, ratio: float
) -> None:
    folder = make_model_folder(tmp_path, variant, max_position_embeddings=512)
    world = World(load_decoder(folder, device="cpu", dtype=dtype), tmp_path / "kv")
    request = world.request(LONG, "weave" if ratio else "reuse", ratio)
    request = replace(request, forced=ids(random.Random(1), 6), watched=6)
    copied, _ = thoughts(world, SMALL, request)
    first, again = thoughts(world, CODED, request)
    world.store.close()
    close = {"float32": 0.1, "bfloat16": 0.25, "float16": 0.15}[dtype]
    assert 0 < (first - copied).abs().max() < close
    assert (first - copied).abs().mean() < close / 50
    if ratio:  # else the first is a pass over scratch, and the second is not
        assert torch.equal(first, again), "who brought a chunk sees what others see"
    else:
        assert (first - again).abs().max() < close / 10 + (dtype != "float32")


@pytest.mark.parametrize("strategy", SLICED)
def test_every_strategy_finds_its_rows_in_codes(world: World, strategy: str) -> None:
    request = world.request(LONG, strategy, 0.0 if strategy == "reuse" else 0.3)
    with Engine(world.decoder, CODED) as engine:
        tickets = [engine.submit(request)]
        want = answer(tickets[0])
        tickets.append(engine.submit(request))
        assert answer(tickets[1]) == want
        records = [ticket.record for ticket in tickets if ticket.record is not None]
        assert [{chunk.tier for chunk in r.chunks} for r in records] == [{"host"}, {"device"}]
        assert records[0].states == records[1].states
        assert engine.stats()["fused_shared"] == 2
        at_rest(engine, world)


def test_computed_anew_nothing_is_rounded(world: World) -> None:
    """But the first chunk, of which no row is chosen: it would be exact, and is called reused."""
    request = world.request(LONG, "weave", 1.0)
    with Engine(world.decoder, CODED) as engine:
        for _ in range(2):
            ticket = engine.submit(request)
            answer(ticket)
            assert ticket.record is not None
            assert ticket.record.chunks[0].state is State.REUSED
    with Engine(world.decoder, SHARED) as engine:
        ticket = engine.submit(request)
        answer(ticket)
        assert ticket.record is not None
        assert ticket.record.chunks[0].state is State.EXACT


@pytest.fixture(scope="module")
def known() -> dict[int, tuple[list[list[int]], list[list[int]]]]:
    """By seed, the answers of each alone, from codes and from copies: the same for every pool."""
    return {}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pages", [24, 40, 256])
def test_a_crowd_gets_the_answers_of_each_alone(
    world: World,
    known: dict[int, tuple[list[list[int]], list[list[int]]]],
    seed: int,
    pages: int,
) -> None:
    """In pools so small that chunks push each other out and requests lose their pages, or have room
    for copies alone."""
    rng = random.Random(seed)
    requests = [
        plain(ids(rng, rng.randint(1, 30)), max_tokens=12)
        if rng.random() < 0.2
        else world.request(shuffled(rng), *rng.choice([("reuse", 0.0), ("weave", 0.3)]))
        for _ in range(16)
    ]

    def alone(cfg: EngineConfig) -> list[list[int]]:
        with Engine(world.decoder, cfg) as engine:
            return [answer(engine.submit(request)) for request in requests]

    if seed not in known:
        known[seed] = alone(CODED), alone(SMALL)
    want, copied = known[seed]
    with Engine(world.decoder, replace(CODED, pool_tokens=4 * pages)) as engine:
        tickets = [engine.submit(request) for request in requests]
        found = [answer(ticket) for ticket in tickets]
        at_rest(engine, world)
        assert engine.stats()["fused_shared"] > 0
    for tokens, coded, whole in zip(found, want, copied, strict=True):
        assert tokens in (coded, whole)


def test_codes_take_a_part_of_the_pages(world: World) -> None:
    """And the books say so; tokens are the same."""
    used = {}
    for cfg in (SHARED, CODED):
        with Engine(world.decoder, cfg) as engine:
            answer(engine.submit(world.request(LONG, "weave", 0.3)))
            used[cfg.shared_codec] = engine.stats()
            at_rest(engine, world)
    raw, coded = used["raw"], used["int8"]
    fold = world.decoder.dtype.itemsize
    assert raw["chunk_tokens"] == coded["chunk_tokens"] == sum(map(len, CHUNKS))
    assert raw["chunk_pages"] == sum(-(-len(chunk) // 4) for chunk in CHUNKS)
    assert coded["chunk_pages"] == sum(-(-len(chunk) // (4 * fold)) for chunk in CHUNKS)


def test_pages_of_codes_are_written_once(world: World) -> None:
    with Engine(world.decoder, CODED) as engine:
        answer(engine.submit(world.request(LONG, "reuse", 0.0)))

        def pages() -> list[torch.Tensor]:
            assert engine._chunks is not None
            at = [page for chunk in engine._chunks for page in chunk.pages]
            pool = engine._pages.empty_kv().pool
            layers = [pool.codes(layer) for layer in range(len(pool.keys))]
            return [x[at].clone() for coded in layers if coded is not None for x in coded[:3]]

        before = engine.run_alone(pages)
        for ratio in (0.2, 0.6, 1.0):
            answer(engine.submit(world.request(LONG[::-1], "weave", ratio)))
        assert all(map(torch.equal, engine.run_alone(pages), before))


def test_chunks_that_are_lost_without_room_are_computed_in_copies(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes take fewer pages than what is computed in their place."""
    request = world.request(CHUNKS, "weave", 0.3)
    keys = {world.encoder.key(c) for c in CHUNKS} | {world.encoder.exact_key(c) for c in CHUNKS}
    acquire = world.store.acquire

    def losing(wanted):  # type: ignore[no-untyped-def]
        lease = acquire([key for key in wanted if key not in keys])
        lease.missing.update(dict.fromkeys(keys.intersection(wanted), Reason.CORRUPT))
        return lease

    monkeypatch.setattr(world.store, "acquire", losing)
    want = world.alone(request)
    beside = plain(ids(random.Random(4), 20), max_tokens=12)
    with Engine(world.decoder, replace(CODED, pool_tokens=4 * 17)) as engine:
        scheduler, begun_again = engine._scheduler, []
        begin_again = scheduler.begin_again
        monkeypatch.setattr(
            scheduler, "begin_again", lambda one: (begun_again.append(one), begin_again(one))
        )
        # both before the next step: else one may be through when the other comes
        first, ticket = engine.run_alone(
            lambda: [engine.submit(each) for each in (beside, request)]
        )
        assert answer(ticket) == want
        assert ticket.record is not None
        assert {chunk.state for chunk in ticket.record.chunks} == {State.COMPUTED}
        assert [sequence.copies for sequence in begun_again] == [True]
        assert len(answer(first)) == 12
        at_rest(engine, world)
        assert engine.stats()["requests_failed"] == 0


def test_a_pool_of_a_share_of_memory_counts_its_scales(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.engine.page_manager._memory_bytes", lambda _: 1 << 22)
    sizes = []
    for cfg in (SHARED, CODED):
        pool = make_pool(replace(cfg, pool_tokens=None, pool_share=1.0), world.decoder)
        coded = pool.codes(0)
        scales = 0 if coded is None else len(pool.keys) * coded.scales.nbytes
        sizes.append(pool.num_pages)
        per_page = (pool.keys.nbytes + pool.values.nbytes + scales) / len(pool.keys[0])
        assert pool.num_pages * per_page <= 1 << 22 < (pool.num_pages + 1) * per_page + per_page
    assert sizes[1] < sizes[0]
