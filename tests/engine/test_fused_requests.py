"""Fused requests in the engine: woven as alone, and loaded beside others."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvweave.engine.engine import Engine
from kvweave.engine.page_manager import make_pool
from kvweave.engine.request import EngineRequest
from kvweave.fuse.prefill import StoredPrompt
from kvweave.fuse.record import WAYS
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.reasons import Reason
from worlds.engine import SMALL, VOCABULARY, alone, ids, plain, with_chunks
from worlds.fused import (
    CHUNKS,
    PREAMBLE,
    QUESTION,
    RNG,
    World,
    answer,
    at_rest,
    shared_rows,
    shuffled,
)
from worlds.serving import GatedDecoder
from worlds.tiny_models import make_model_folder


@pytest.fixture(scope="module")
def float_decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model_folder(
        tmp_path_factory.mktemp("fused"), "llama", max_position_embeddings=512
    )
    return load_decoder(folder, device="cpu")


@pytest.fixture
def world(float_decoder: Decoder, tmp_path: Path) -> Iterator[World]:
    world = World(float_decoder, tmp_path)
    yield world
    world.store.close()


@pytest.mark.parametrize("strategy", ["reuse", "weave", "cacheblend", "kvshare-like", "epic"])
def test_a_fused_answer_is_the_same_as_alone(world: World, strategy: str) -> None:
    request = world.request(
        [CHUNKS[2], CHUNKS[0], CHUNKS[2]], strategy, 0.3 * (strategy != "reuse")
    )
    want = world.alone(request)
    with Engine(world.decoder, SMALL) as engine:
        ticket = engine.submit(request)
        assert answer(ticket) == want
        assert ticket.record is not None
        assert ticket.record.strategy == strategy
        assert ticket.record.counts["reused"] > 0
        at_rest(engine, world)


def test_a_mixed_crowd_in_a_small_pool_gets_the_answers_of_each_alone(world: World) -> None:
    rng = random.Random(1)
    requests: list[EngineRequest] = []
    for _ in range(30):
        kind = rng.random()
        if kind < 0.5:
            requests.append(world.request(shuffled(rng), rng.choice(["reuse", "weave", "epic"])))
        elif kind < 0.8:
            requests.append(with_chunks(PREAMBLE, shuffled(rng), ids(rng, 4)))
        else:
            requests.append(plain(ids(rng, rng.randint(1, 30)), max_tokens=12))
    want = [
        world.alone(r) if r.fused else [c.token_id for c in alone(world.decoder, r)]
        for r in requests
    ]
    cfg = replace(SMALL, pool_tokens=4 * 28)
    with Engine(world.decoder, cfg) as engine:
        tickets = [engine.submit(request) for request in requests]
        assert [answer(ticket) for ticket in tickets] == want
        at_rest(engine, world)


def test_a_fused_request_that_lost_its_pages_is_woven_again(world: World) -> None:
    fused = world.request(CHUNKS)
    fused = replace(fused, sampling=replace(fused.sampling, max_tokens=40))
    first = plain(ids(random.Random(4), 20), max_tokens=60)
    want = world.alone(fused)
    with Engine(world.decoder, replace(SMALL, pool_tokens=4 * 28)) as engine:
        beside = engine.submit(first)
        next(beside)
        ticket = engine.submit(fused)
        assert answer(ticket) == want
        assert ticket.timeline.preempted > 0
        assert list(beside) == alone(world.decoder, first)[1:]
        at_rest(engine, world)


def loaders(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> list[str]:
    """The threads that ask for bytes, in turn. All but the first wait for the gate."""
    asked: list[str] = []
    opens = StoredPrompt.__init__

    def watched(self: StoredPrompt, *how: Any) -> None:
        asked.append(threading.current_thread().name.partition("_")[0])
        assert len(asked) == 1 or gate.wait(30)
        opens(self, *how)

    monkeypatch.setattr(StoredPrompt, "__init__", watched)
    return asked


def test_a_fused_request_that_lost_its_pages_loads_again_while_others_are_computed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = world.request(CHUNKS)
    fused = replace(fused, sampling=replace(fused.sampling, max_tokens=40))
    first = plain(ids(random.Random(4), 20), max_tokens=60)
    want, gate = world.alone(fused), threading.Event()
    asked = loaders(monkeypatch, gate)
    with Engine(world.decoder, replace(SMALL, pool_tokens=4 * 28)) as engine:
        beside = engine.submit(first)
        next(beside)
        ticket = engine.submit(fused)
        assert list(beside) == alone(world.decoder, first)[1:], "it waited for bytes of another"
        assert asked == ["engine-load", "engine-load"]
        late = engine.submit(plain([1, 2, 3], max_tokens=4))
        assert len(answer(late)) == 4, "it stood in the way"
        gate.set()
        assert answer(ticket) == want
        assert ticket.timeline.preempted == 1
        at_rest(engine, world)


def test_a_fused_guess_that_lost_its_pages_loads_again_when_it_is_released(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated, gate = GatedDecoder(world.decoder), threading.Event()
    request, want = world.request(CHUNKS), world.alone(world.request(CHUNKS))
    asked = loaders(monkeypatch, gate)
    with Engine(gated, replace(SMALL, pool_tokens=4 * 28)) as engine:
        beside = engine.submit(plain(ids(random.Random(4), 20), max_tokens=60))
        gated.permits.release()
        next(beside)
        guess = engine.submit(request, held=True)
        while not engine.stats()["parked"]:
            assert len(asked) < 2
            gated.permits.release()
            steps = gated.steps
            while gated.steps == steps:
                time.sleep(0.001)
        guess.release()
        for _ in range(3):  # others go on
            gated.permits.release()
            next(beside)
        gate.set()
        gated.permits.release(1000)
        assert answer(guess) == want
        assert asked == ["engine-load", "engine-load"]
        list(beside)
        at_rest(engine, world)


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_a_fused_request_that_ends_while_it_loads_again_gives_everything_back(
    world: World, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    fused = world.request(CHUNKS)
    fused = replace(fused, sampling=replace(fused.sampling, max_tokens=40))
    first = plain(ids(random.Random(4), 20), max_tokens=60)
    gate = threading.Event()
    asked = loaders(monkeypatch, gate)
    with Engine(world.decoder, replace(SMALL, pool_tokens=4 * 28)) as engine:
        beside = engine.submit(first)
        next(beside)
        ticket = engine.submit(fused)
        assert len(list(beside)) == 59
        assert asked == ["engine-load", "engine-load"]
        if end == "cancel":
            ticket.cancel()
            assert ticket.wait(30)
        else:
            monkeypatch.setattr(StoredPrompt, "arrive", no_bytes)
        gate.set()
        if end == "fail":
            with pytest.raises(RuntimeError, match="no bytes today"):
                answer(ticket)
    assert world.store.num_pinned() == 0
    assert engine.stats()["pages_used"] == 0


def no_bytes(_: StoredPrompt) -> None:
    raise RuntimeError("no bytes today")


def test_fused_traffic_leaves_exact_answers_and_shared_rows_bit_identical(world: World) -> None:
    rng = random.Random(2)
    asked = [with_chunks(PREAMBLE, chunks, QUESTION) for chunks in (CHUNKS[:2], CHUNKS[1:3])]
    asked = [replace(r, sampling=replace(r.sampling, logprobs=2)) for r in asked]
    pool = make_pool(SMALL, world.decoder)
    with Engine(world.decoder, SMALL, pool=pool) as engine:
        cold = [list(engine.submit(request)) for request in (*asked, *asked)][2:]
        before = shared_rows(engine, pool)
        for _ in range(40):
            tickets = [engine.submit(world.request(shuffled(rng))) for _ in range(3)]
            for ticket in tickets:
                list(ticket)
        after = shared_rows(engine, pool)
        assert len(before) == 5
        assert before.keys() == after.keys(), "fused KV entered the tree"
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert [list(engine.submit(request)) for request in asked] == cold
        at_rest(engine, world)


def test_an_exact_path_in_the_tree_stands_in_front_of_what_is_woven(world: World) -> None:
    chunks = [CHUNKS[2], CHUNKS[0], CHUNKS[3]]
    with Engine(world.decoder, SMALL) as engine:
        list(engine.submit(with_chunks(PREAMBLE, chunks[:2], QUESTION)))
        ticket = engine.submit(replace(world.request(chunks, "weave", 1.0), use_tree=True))
        got = answer(ticket)
        assert ticket.record is not None
        states = [chunk.state.value for chunk in ticket.record.chunks]
        assert states == ["exact", "exact", "reused"]
        assert [chunk.start for chunk in ticket.record.chunks] == [6, 25, 36]
        assert ticket.record.counts["exact"] == 6 + 19 + 11
        # everything behind the exact part was recomputed, so the answer is exact
        full = alone(world.decoder, with_chunks(PREAMBLE, chunks, QUESTION, max_tokens=6))
        assert got == [choice.token_id for choice in full]
        at_rest(engine, world)


def test_a_request_loads_while_others_are_computed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    arrive: Callable[[StoredPrompt], None] = StoredPrompt.arrive

    def slowly(self: StoredPrompt) -> None:
        assert go.wait(30)
        arrive(self)

    monkeypatch.setattr(StoredPrompt, "arrive", slowly)
    request = world.request(CHUNKS)
    with Engine(world.decoder, SMALL) as engine:
        other = engine.submit(plain([1, 2, 3], max_tokens=300))
        next(other)
        loading = engine.submit(request)
        for _ in range(299):
            next(other)  # its bytes are not there, and no other waits for them
        assert not loading.is_done
        go.set()
        assert answer(loading) == world.alone(request)
        assert loading.timeline.loading_s > 0
        at_rest(engine, world)


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_request_that_ends_while_it_loads_gives_its_lease_back(
    world: World, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    go, there = threading.Event(), threading.Event()

    def slowly(self: StoredPrompt) -> None:
        there.set()
        assert go.wait(30)

    monkeypatch.setattr(StoredPrompt, "arrive", slowly)
    with Engine(world.decoder, SMALL) as engine:
        other = engine.submit(plain([1, 2, 3], max_tokens=400))
        next(other)
        loading = engine.submit(world.request(CHUNKS))
        assert there.wait(30)
        assert world.store.num_pinned() > 0
        if end == "cancel":
            loading.cancel()
            assert loading.wait(30)
            other.cancel()
            go.set()
        else:
            threading.Timer(0.05, go.set).start()
            engine.close()
    assert world.store.num_pinned() == 0
    assert engine.stats()["pages_used"] == 0


def test_bytes_that_arrive_when_all_requests_have_ended_are_given_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine thread has nothing to do any more, and still hears of them."""
    go, there = threading.Event(), threading.Event()

    def slowly(self: StoredPrompt) -> None:
        there.set()
        assert go.wait(30)

    monkeypatch.setattr(StoredPrompt, "arrive", slowly)
    with Engine(world.decoder, replace(SMALL, idle_s=0.01)) as engine:
        other = engine.submit(plain([1, 2, 3], max_tokens=400))
        next(other)
        loading = engine.submit(world.request(CHUNKS))
        assert there.wait(30)
        for ticket in (loading, other):
            ticket.cancel()
            assert ticket.wait(30)
        thread = engine.run_alone(threading.current_thread)
        thread.join(0.2)  # many times idle_s
        assert world.store.num_pinned() > 0
        go.set()
        thread.join(30)
        assert not thread.is_alive()
        assert world.store.num_pinned() == 0


def test_chunks_that_are_lost_on_the_way_are_computed(world: World) -> None:
    request = world.request([CHUNKS[2], CHUNKS[0]])
    world.store.delete([world.encoder.key(CHUNKS[2]), world.encoder.key(CHUNKS[0])])
    with Engine(world.decoder, SMALL) as engine:
        ticket = engine.submit(request)
        full = with_chunks(PREAMBLE, [CHUNKS[2], CHUNKS[0]], QUESTION, max_tokens=6)
        assert answer(ticket) == [c.token_id for c in alone(world.decoder, full)]
        assert ticket.record is not None
        assert [chunk.why for chunk in ticket.record.chunks] == [str(Reason.ABSENT)] * 2
        at_rest(engine, world)


@pytest.mark.parametrize(
    ("part", "strategy"), [("prepare", "weave"), ("order_fusion", "cacheblend")]
)
def test_a_weave_that_fails_fails_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, part: str, strategy: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no weaving today")

    monkeypatch.setattr(f"kvweave.fuse.prefill.{part}", broken)
    with Engine(world.decoder, SMALL) as engine:
        good = plain([1, 2, 3], max_tokens=20)
        beside = engine.submit(good)
        with pytest.raises(RuntimeError, match="no weaving today"):
            list(engine.submit(world.request(CHUNKS, strategy)))
        stats = engine.stats()
        assert [stats[f"fused_{how}"] for how in ("begun", *WAYS)] == [1, 0, 0, 0]
        assert list(beside) == alone(world.decoder, good)
        at_rest(engine, world)


def test_a_held_fused_request_is_woven_and_waits(world: World) -> None:
    request = world.request(CHUNKS)
    with Engine(world.decoder, SMALL) as engine:
        guess = engine.submit(request, held=True)
        engine.run_alone(lambda: None)
        engine.run_alone(lambda: None)
        assert not guess.is_done
        guess.release()
        assert answer(guess) == world.alone(request)
        dropped = engine.submit(request, held=True)
        dropped.cancel()
        assert dropped.wait(30)
        at_rest(engine, world)


@pytest.mark.parametrize("strategy", ["weave", "cacheblend"])
def test_a_close_call_is_computed_exactly_before_anything_is_handed_out(
    world: World, strategy: str
) -> None:
    woven = replace(world.request(CHUNKS, strategy, 0.3), use_tree=True)
    assert woven.fused is not None
    exact = alone(world.decoder, with_chunks(PREAMBLE, CHUNKS, QUESTION, max_tokens=6))
    unsure = replace(woven, fused=replace(woven.fused, close_call=1e6))
    sure = replace(woven, fused=replace(woven.fused, close_call=1e-9))
    with Engine(world.decoder, SMALL) as engine:
        ticket = engine.submit(unsure)
        assert answer(ticket) == [choice.token_id for choice in exact]
        assert ticket.record is not None
        assert (ticket.record.strategy, ticket.record.counts["reused"]) == ("prefix", 0)
        assert ticket.record.counts["exact"] == len(PREAMBLE), "what the first pass had in front"
        stats = engine.stats()
        assert (stats["fused_close_calls"], stats["requests_finished"]) == (1, 1)
        guess = engine.submit(unsure, held=True)
        guess.release()
        assert answer(guess) == [choice.token_id for choice in exact]
        kept = engine.submit(sure)
        answer(kept)
        assert kept.record is not None
        assert kept.record.strategy == strategy
        at_rest(engine, world)


def test_a_preamble_can_be_pinned_and_stays(world: World) -> None:
    cfg = replace(SMALL, pool_tokens=4 * 24)
    rng = random.Random(3)
    with Engine(world.decoder, cfg) as engine:
        assert engine.run_alone(lambda: engine.pin_preamble(world.encoder.preamble))
        for _ in range(10):  # enough to push everything else out
            list(engine.submit(with_chunks(PREAMBLE, [ids(rng, 30)], QUESTION)))
            request = plain(ids(rng, 60), max_tokens=20)
            assert list(engine.submit(request)) == alone(world.decoder, request)
        ticket = engine.submit(with_chunks(PREAMBLE, [ids(rng, 8)], QUESTION))
        list(ticket)
        assert ticket.record is not None
        assert ticket.record.counts["exact"] >= len(PREAMBLE)
        assert max(max(chunk) for chunk in CHUNKS) < VOCABULARY
        at_rest(engine, world)


def test_where_any_chunk_may_be_gone_only_pinned_preambles_stay_in_the_tree(world: World) -> None:
    rng = random.Random(4)
    requests = [
        with_chunks(preamble, [ids(rng, 9), ids(rng, 9)], QUESTION)
        for preamble in (PREAMBLE, PREAMBLE, ids(rng, 5), ())
    ]
    with Engine(world.decoder, SMALL) as engine:
        assert engine.run_alone(lambda: engine.pin_preamble(world.encoder.preamble))
        pinned = engine.run_alone(lambda: {node.chunk_id for node in engine.tree})
        found = engine.tombstones.generation
        for request in requests:
            list(engine.submit(request))
        assert engine.run_alone(lambda: len(engine.tree)) > len(pinned)
        engine.forget(None)
        assert engine.run_alone(lambda: {node.chunk_id for node in engine.tree}) == pinned
        for request in requests:  # each found before
            got = list(engine.submit(replace(request, as_of=found)))
            assert got == alone(world.decoder, request)
        names = engine.run_alone(lambda: {node.chunk_id for node in engine.tree})
        assert not any(name.endswith(c.id) for name in names for r in requests for c in r.chunks)
        at_rest(engine, world)


def test_a_preamble_pinned_in_the_middle_of_the_pool_stops_no_request_for_ever(
    world: World,
) -> None:
    request = world.request(CHUNKS)  # 13 pages of 4, side by side
    with Engine(world.decoder, replace(SMALL, pool_tokens=4 * 20)) as engine:
        beside = engine.submit(plain(ids(random.Random(5), 9 * 4)), held=True)
        while beside.timeline.prefilled_s is None:
            engine.run_alone(lambda: None)
        assert engine.stats()["pages_used"] == 9, "a request runs while the preamble comes"
        assert engine.run_alone(lambda: engine.pin_preamble(world.encoder.preamble))
        beside.cancel()
        assert beside.wait(20)
        assert engine.stats()["pages_used"] == 2
        engine.check(request.prompt_ids)
        ticket, behind = engine.submit(request), engine.submit(plain(QUESTION, max_tokens=3))
        assert ticket.wait(20), "no run of pages will ever be long enough"
        assert behind.wait(20)
        assert answer(ticket) == world.alone(request)
        at_rest(engine, world)


def test_an_answer_may_fill_the_pool_although_a_preamble_is_pinned(world: World) -> None:
    request = plain(ids(RNG, 30), max_tokens=500)
    with Engine(world.decoder, replace(SMALL, pool_tokens=4 * 20)) as engine:
        assert engine.run_alone(lambda: engine.pin_preamble(world.encoder.preamble))
        ticket = engine.submit(request)
        assert ticket.wait(30)
        want = [choice.token_id for choice in alone(world.decoder, request)]
        assert answer(ticket) == want[:50]
        at_rest(engine, world)
