"""A fused prompt feeds the tree with what stands exact in front of it, and with nothing else."""

import ast
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.page_manager import make_pool
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.kv.tree.node import Node
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool
from kvweave.model.rows import Rows
from worlds.engine import SMALL, alone, plain, with_chunks
from worlds.fused import (
    CHUNKS,
    PREAMBLE,
    QUESTION,
    World,
    answer,
    at_rest,
    shared_rows,
    shuffled,
)

A, B, C, D = CHUNKS
ROUNDING = (
    1e-4  # the preamble comes in float32; what is approximate is off by a thousand times that
)


def feeding(
    world: World,
    chunks: Sequence[tuple[int, ...]],
    computed: Sequence[int],
    strategy: str = "weave",
    ratio: float = 0.3,
) -> EngineRequest:
    """A fused request that reads the tree and computes some of its chunks."""
    request = world.request(list(chunks), strategy, ratio)
    assert request.fused is not None
    part = replace(request.fused, computed=dict.fromkeys(computed, "asked for"))
    return replace(request, fused=part, use_tree=True)


def engine_and_pool(world: World, cfg: EngineConfig = SMALL) -> tuple[Engine, KVPool]:
    pool = make_pool(cfg, world.decoder)
    return Engine(world.decoder, cfg, pool=pool), pool


def paths(engine: Engine) -> dict[bytes, list[Node]]:
    def of(node: Node) -> list[Node]:
        above = [] if node.parent is None or node.parent.parent is None else of(node.parent)
        return [*above, node]

    return engine.run_alone(lambda: {node.key: of(node) for node in engine.tree})


def tokens_of(path: Sequence[Node]) -> list[int]:
    assert "preamble" in path[0].chunk_id
    return [*PREAMBLE, *(i for node in path[1:] for i in ast.literal_eval(node.chunk_id))]


def in_tree(engine: Engine) -> set[tuple[int, ...]]:
    """The prompts that the tree has exact KV of."""
    return {tuple(tokens_of(path)) for path in paths(engine).values()}


def assert_exact(engine: Engine, pool: KVPool, decoder: Decoder) -> None:
    """Every row that the tree would give out is the one that full prefill computes."""
    decoder = Decoder(decoder.spec, decoder.weights)
    rows, page = shared_rows(engine, pool), pool.page_tokens
    for key, path in paths(engine).items():
        ids, node = tokens_of(path), path[-1]
        kv = decoder.new_kv(len(ids))
        decoder.forward([Rows(ids, range(len(ids)), kv, [len(ids) - 1])])
        start = (node.end - node.num_tokens) // page * page
        for layer in range(decoder.spec.num_layers):
            for got, want in zip(
                rows[key][:, layer], (kv.keys(layer), kv.values(layer)), strict=True
            ):
                torch.testing.assert_close(got, want[start : node.end], rtol=0, atol=ROUNDING)


def answered(engine: Engine, request: EngineRequest, way: str) -> Ticket:
    """Compute a request alone, or beside another that is being answered."""
    beside = None
    if way == "joined":
        beside = engine.submit(plain(QUESTION, max_tokens=60))
        next(beside)
    ticket = engine.submit(request)
    answer(ticket)
    if beside is not None:
        beside.cancel()
        assert beside.wait(30)
    return ticket


@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        ("weave", "streamed"),  # with drift and taper
        ("weave", "joined"),
        ("epic", "streamed"),
        ("epic", "joined"),
        ("reuse", "joined"),
        ("cacheblend", "whole"),
        ("kvshare-like", "whole"),
    ],
)
def test_chunks_computed_in_front_are_exact_and_enter_the_tree(
    world: World, strategy: str, way: str
) -> None:
    request = feeding(world, [A, C, D, B], [0, 1], strategy, 0.3 * (strategy != "reuse"))
    engine, pool = engine_and_pool(world)
    with engine:
        ticket = answered(engine, request, way)
        assert ticket.record is not None
        assert ticket.record.way == way
        assert ticket.record.counts["reused"] > 0
        assert in_tree(engine) == {PREAMBLE, PREAMBLE + A, PREAMBLE + A + C}
        assert engine.stats()["fused_offered"] == 3
        assert_exact(engine, pool, world.decoder)
        exact = with_chunks(PREAMBLE, [A, C, B], QUESTION)
        behind = engine.submit(exact)
        assert list(behind) == alone(world.decoder, exact)
        assert behind.record is not None
        assert behind.record.counts["exact"] == len(PREAMBLE + A + C)
        at_rest(engine, world)


def test_the_next_fused_prompt_reads_them_and_goes_on_behind(world: World) -> None:
    engine, pool = engine_and_pool(world)
    with engine:
        exact = []
        for computed in ([0], [0, 1], [0, 1]):
            ticket = engine.submit(feeding(world, [A, C, D], computed))
            answer(ticket)
            assert ticket.record is not None
            exact.append(ticket.record.counts["exact"])
        assert exact == [len(PREAMBLE), len(PREAMBLE + A), len(PREAMBLE + A + C)]
        assert PREAMBLE + A + C in in_tree(engine)
        assert_exact(engine, pool, world.decoder)
        at_rest(engine, world)


def test_what_stands_behind_a_reused_chunk_stays_out(world: World) -> None:
    engine, _ = engine_and_pool(world)
    with engine:
        answer(engine.submit(feeding(world, [A, C, D], [0, 2])))
        assert in_tree(engine) == {PREAMBLE, PREAMBLE + A}
        answer(engine.submit(feeding(world, [D, C, A], [1, 2])))  # the first is stored, isolated
        assert in_tree(engine) == {PREAMBLE, PREAMBLE + A}, "the store's bytes went through a codec"
        at_rest(engine, world)


@pytest.mark.parametrize("way", ["streamed", "joined"])
def test_what_was_deleted_since_it_was_found_is_not_brought_back(world: World, way: str) -> None:
    request = feeding(world, [A, C, D], [0, 1])
    engine, _ = engine_and_pool(world)
    with engine:
        found = engine.tombstones.generation
        engine.forget([request.chunks[1].id])
        answered(engine, replace(request, as_of=found), way)
        assert in_tree(engine) == {PREAMBLE, PREAMBLE + A}
        at_rest(engine, world)


@pytest.mark.parametrize("seed", range(12))
def test_all_that_a_crowd_leaves_in_the_tree_is_exact(world: World, seed: int) -> None:
    """Fused and exact, sliced, preempted, held, released and dropped."""
    rng = random.Random(seed)
    cfg = replace(SMALL, pool_tokens=4 * rng.choice([30, 256]), background_rows=5)
    engine, pool = engine_and_pool(world, cfg)
    with engine:
        tickets = []
        for _ in range(10):
            chunks = shuffled(rng)
            if rng.random() < 0.3:
                request = with_chunks(PREAMBLE, chunks, QUESTION)
            else:
                computed = rng.sample(range(len(chunks)), rng.randint(0, len(chunks)))
                request = feeding(
                    world, chunks, computed, rng.choice(["weave", "epic", "kvshare-like"])
                )
            held, background = rng.choice([(False, False), (True, False), (False, True)])
            ticket = engine.submit(replace(request, background=background), held=held)
            if rng.random() < 0.25:
                ticket.cancel()
            ticket.release()
            tickets.append(ticket)
        for ticket in tickets:
            answer(ticket)
        assert_exact(engine, pool, world.decoder)
        at_rest(engine, world)
