"""Fused requests over chunks that lie once in the pool: answered as from copies of their own, which
drift moves by the mean over a chunk here, as shared ones are seen."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.own_steps import OwnSteps
from kvweave.engine.request import EngineRequest
from kvweave.fuse.request import State
from kvweave.model.load import load_decoder
from kvweave.reasons import Reason
from kvweave.types import ChunkId
from worlds.engine import SMALL, alone, ids, plain, until, with_chunks
from worlds.fused import CHUNKS, PREAMBLE, QUESTION, World, answer, at_rest, shuffled
from worlds.tiny_models import YARN, make_model_folder

pytestmark = pytest.mark.usefixtures("by_the_mean")

SHARED = replace(SMALL, share_chunks=True, overlap_steps=True)
SLICED = ["reuse", "weave", "weave-deep", "fusionrag", "fusionrag-code", "epic", "random"]
LONG = [CHUNKS[2], CHUNKS[0], CHUNKS[3], CHUNKS[2], CHUNKS[1]]  # one chunk twice


def thoughts(world: World, cfg: EngineConfig, request: EngineRequest) -> Tensor:
    """Probabilities of every token of an answer."""
    with Engine(world.decoder, cfg) as engine:
        ticket = engine.submit(request)
        answer(ticket)
    return torch.stack(ticket.distributions).exp()


def resident(engine: Engine) -> int:
    return int(engine.stats()["chunks_resident"])


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("strategy", SLICED)
def test_an_answer_over_shared_chunks_is_that_over_copies(
    world: World, strategy: str, ratio: float
) -> None:
    """Twice: chunks are brought for the first and lie there for the second."""
    if strategy == "reuse" and ratio:
        pytest.skip("reuse recomputes nothing")
    request = world.request(LONG, strategy, ratio)
    want = world.alone(request)
    with Engine(world.decoder, SHARED) as engine:
        tickets = []
        for _ in range(2):
            tickets.append(engine.submit(request))
            assert answer(tickets[-1]) == want
        tiers = [{chunk.tier for chunk in t.record.chunks} for t in tickets if t.record]
        assert tiers == [{"host"}, {"device"}]
        assert tickets[1].record is not None
        assert tickets[1].record.loaded_bytes == {}
        assert tickets[0].record is not None
        assert tickets[1].record.states == tickets[0].record.states
        assert engine.stats()["fused_shared"] == 2
        assert resident(engine) == len(set(LONG))
        at_rest(engine, world)


@pytest.mark.parametrize("variant", ["llama", "qwen2-yarn", "qwen3", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_the_model_thinks_is_the_same_in_every_precision(
    tmp_path: Path, variant: str, dtype: str
) -> None:
    folder = make_model_folder(tmp_path, variant, max_position_embeddings=512)
    decoder = load_decoder(folder, device="cpu", dtype=dtype)
    world = World(decoder, tmp_path / "kv")
    request = world.request(LONG, "weave", 0.3)
    request = replace(request, forced=ids(random.Random(1), 6), watched=6)
    close = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.05}[dtype]
    copied, first = (thoughts(world, cfg, request) for cfg in (SMALL, SHARED))
    world.store.close()
    assert (first - copied).abs().max() < close
    assert (first - copied).abs().mean() < close / 50


def test_channels_that_do_not_turn_have_no_part_in_yarn(tmp_path: Path) -> None:
    folder = make_model_folder(
        tmp_path, "llama", max_position_embeddings=512,
        rope_parameters={**YARN, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    decoder = load_decoder(folder, device="cpu", dtype="float32")
    assert decoder.spec.rope.rotary_dim < decoder.spec.head_dim
    world = World(decoder, tmp_path / "kv")
    request = world.request(LONG, "weave", 0.3)
    request = replace(request, forced=ids(random.Random(1), 6), watched=6)
    copied, shared = (thoughts(world, cfg, request) for cfg in (SMALL, SHARED))
    world.store.close()
    assert (shared - copied).abs().max() < 1e-4


def test_drift_moves_what_a_request_sees_as_it_does_in_a_copy(world: World) -> None:
    """Prompt and answer; shared pages are not touched by it, and who reads them beside it sees what
    its own rows say."""
    request = replace(world.request(LONG, "weave", 0.4), forced=tuple(range(3, 9)), watched=6)
    part = request.fused
    assert part is not None
    other = replace(request, fused=replace(part, strategy=replace(part.strategy, drift=0.0)))
    found = []
    for cfg in (SMALL, SHARED):
        with Engine(world.decoder, cfg) as engine:
            tickets = [engine.submit(each) for each in (request, other, request)]
            for ticket in tickets:
                answer(ticket)
            found.append([torch.stack(ticket.distributions) for ticket in tickets])
            at_rest(engine, world)
    copied, shared = found
    for want, got in zip(copied, shared, strict=True):
        assert torch.allclose(got, want, atol=1e-5)
    assert not torch.allclose(shared[0][1:], shared[1][1:], atol=1e-3)


def make_request(world: World, rng: random.Random) -> EngineRequest:
    """Fused over shared chunks or copies, exact or plain."""
    kind = rng.random()
    if kind < 0.6:
        strategy = rng.choice([*SLICED, "cacheblend", "qcfuse"])
        ratio = 0.0 if strategy == "reuse" else rng.choice([0.2, 0.5, 1.0])
        request = world.request(shuffled(rng), strategy, ratio)
        return replace(request, use_tree=rng.random() < 0.3)
    if kind < 0.8:
        return with_chunks(PREAMBLE, shuffled(rng), ids(rng, 4))
    return plain(ids(rng, rng.randint(1, 30)), max_tokens=12)


def answer_alone(world: World, request: EngineRequest) -> list[int]:
    if request.fused is not None:
        return world.alone(request)
    return [choice.token_id for choice in alone(world.decoder, request)]


@pytest.fixture(scope="module")
def known() -> dict[int, list[list[int]]]:
    """By seed, the answers of each alone: the same for every size of the pool."""
    return {}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pages", [22, 40, 256])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_mixed_crowd_gets_the_answers_of_each_alone(
    world: World, known: dict[int, list[list[int]]], seed: int, pages: int, overlaps: bool
) -> None:
    """In pools so small that chunks push each other out and requests lose their pages."""
    rng = random.Random(seed)
    requests = [make_request(world, rng) for _ in range(24)]
    if seed not in known:
        known[seed] = [answer_alone(world, request) for request in requests]
    want = known[seed]
    cfg = replace(SHARED, pool_tokens=4 * pages, overlap_steps=overlaps)
    with Engine(world.decoder, cfg) as engine:
        tickets = [engine.submit(request) for request in requests]
        for request, ticket, tokens in zip(requests, tickets, want, strict=True):
            if request.fused is None or not request.use_tree:
                assert answer(ticket) == tokens
            else:  # what the tree has in front is exact there, and stored KV when it is alone
                assert len(answer(ticket)) == len(tokens)
        at_rest(engine, world)
        assert engine.stats()["fused_shared"] > 0


def test_a_request_that_lost_its_pages_reads_the_chunks_again(world: World) -> None:
    fused = world.request(CHUNKS, "weave", 0.3)
    fused = replace(fused, sampling=replace(fused.sampling, max_tokens=40))
    first = plain(ids(random.Random(4), 20), max_tokens=60)
    want = world.alone(fused)
    with Engine(world.decoder, replace(SHARED, pool_tokens=4 * 28)) as engine:
        beside = engine.submit(first)
        next(beside)
        ticket = engine.submit(fused)
        assert answer(ticket) == want
        assert ticket.timeline.preempted > 0
        assert list(beside) == alone(world.decoder, first)[1:]
        at_rest(engine, world)


def test_chunks_that_nobody_reads_make_room(world: World) -> None:
    """Neighbours of what is read leave, what is read stays, and all come again."""
    reader = world.request([CHUNKS[0]], "reuse", 0.0)
    reader = replace(reader, sampling=replace(reader.sampling, max_tokens=30))
    others = [world.request([chunk], "weave", 0.3) for chunk in CHUNKS[1:]]
    want = world.alone(reader)
    answers = [world.alone(other) for other in others]
    with Engine(world.decoder, replace(SHARED, pool_tokens=4 * 26)) as engine:
        for other, tokens in zip(others, answers, strict=True):
            assert answer(engine.submit(other)) == tokens
        assert resident(engine) == 3
        ticket = engine.submit(reader)
        next(ticket)
        assert len(answer(engine.submit(plain(ids(random.Random(1), 40), max_tokens=20)))) == 20
        engine.run_alone(engine.check_integrity)
        assert engine.stats()["chunk_evictions"] > 0
        assert answer(ticket) == want[1:]
        for other, tokens in zip(others, answers, strict=True):
            assert answer(engine.submit(other)) == tokens
        at_rest(engine, world)


def test_one_pool_takes_more_requests_than_copies_leave_room_for(world: World) -> None:
    request = world.request([CHUNKS[2], CHUNKS[0]], "reuse", 0.0)
    request = replace(request, sampling=replace(request.sampling, max_tokens=9))

    def most_running(cfg_shares: bool) -> int:
        cfg = replace(SMALL, pool_tokens=4 * 48, max_running=32, share_chunks=cfg_shares)
        most = 0
        with Engine(world.decoder, cfg) as engine:
            tickets = [engine.submit(request) for _ in range(24)]
            while not all(ticket.is_done for ticket in tickets):
                most = max(most, int(engine.run_alone(lambda: engine.stats()["running"])))
            assert engine.stats()["preemptions"] < 48
            at_rest(engine, world)
        return most

    assert most_running(True) > 1.5 * most_running(False)


def test_what_the_tree_has_in_front_is_read_where_it_lies(world: World) -> None:
    """The same pages, held by the tree and by both requests; and the answer is right."""
    exact = with_chunks(PREAMBLE, [CHUNKS[2], CHUNKS[0]], QUESTION, max_tokens=4)
    fused = world.request([CHUNKS[2], CHUNKS[0], CHUNKS[3]], "weave", 0.3)
    fused = replace(fused, use_tree=True, watched=1)
    fused = replace(fused, sampling=replace(fused.sampling, max_tokens=40))
    thoughts = []
    for shares in (False, True):
        with Engine(world.decoder, replace(SMALL, share_chunks=shares)) as engine:
            answer(engine.submit(exact))
            before = engine.stats()["pages_used"]
            ticket = engine.submit(fused)
            next(ticket)
            used = engine.stats()["pages_used"] - before
            thoughts.append(ticket.distributions[0])
            assert ticket.record is not None
            assert [c.tier for c in ticket.record.chunks][:2] == ["tree", "tree"]
            engine.run_alone(engine.check_integrity)
            answer(ticket)
            at_rest(engine, world)
            if shares:  # 36 tokens lie in the tree's pages; own are the question and what it ends
                assert used < 12
    assert torch.allclose(*thoughts, atol=1e-5)


def test_a_chunk_that_is_not_stored_is_computed_and_enters_the_tree_in_front(world: World) -> None:
    new = ids(random.Random(1), 9)
    request = world.request([new, CHUNKS[0], CHUNKS[2]], "weave", 0.3)
    request = replace(request, use_tree=True)
    want = world.alone(request)
    with Engine(world.decoder, SHARED) as engine:
        ticket = engine.submit(request)
        assert answer(ticket) == want
        assert ticket.record is not None
        states = [chunk.state for chunk in ticket.record.chunks]
        assert states == [State.COMPUTED, State.REUSED, State.REUSED]
        assert engine.stats()["fused_offered"] == 2  # the preamble and the chunk
        at_rest(engine, world)


def test_chunks_that_are_lost_on_the_way_are_computed_into_their_pages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool that has not one page more."""
    request = world.request(CHUNKS, "weave", 0.3)
    keys = {world.encoder.key(CHUNKS[2]), world.encoder.exact_key(CHUNKS[2])}
    acquire = world.store.acquire

    def losing(wanted):  # type: ignore[no-untyped-def]
        lease = acquire([key for key in wanted if key not in keys])
        lease.missing.update(dict.fromkeys(keys.intersection(wanted), Reason.CORRUPT))
        return lease

    monkeypatch.setattr(world.store, "acquire", losing)
    want = world.alone(request)
    with Engine(world.decoder, replace(SHARED, pool_tokens=4 * 18)) as engine:
        ticket = engine.submit(request)
        assert answer(ticket) == want
        assert ticket.record is not None
        assert ticket.record.chunks[2].why == str(Reason.CORRUPT)
        assert resident(engine) < len(CHUNKS)
        at_rest(engine, world)


def test_a_deleted_chunk_is_found_no_more_and_read_to_the_end(world: World) -> None:
    request = world.request([CHUNKS[0], CHUNKS[2]], "reuse", 0.0)
    request = replace(request, sampling=replace(request.sampling, max_tokens=20))
    want = world.alone(request)
    gone = ChunkId(repr(list(CHUNKS[2])))
    with Engine(world.decoder, SHARED) as engine:
        before = engine.tombstones.generation
        ticket = engine.submit(request)
        next(ticket)
        key = world.encoder.key(CHUNKS[2])
        assert engine.resident([key]) == {key}
        engine.forget([gone])
        assert engine.resident([key]) == set()
        assert answer(ticket) == want[1:]
        assert resident(engine) == 1
        # one that found it before brings it for itself alone
        late = engine.submit(replace(request, as_of=before))
        assert answer(late) == want
        assert engine.resident([key]) == set()
        at_rest(engine, world)
        engine.forget(None)
        assert resident(engine) == 0
        at_rest(engine, world)


def test_tenants_do_not_find_each_others_chunks(world: World) -> None:
    request = world.request([CHUNKS[0], CHUNKS[2]], "reuse", 0.0)
    with Engine(world.decoder, SHARED) as engine:
        for tenant in ("a", "b"):
            ticket = engine.submit(replace(request, namespace=tenant))
            assert answer(ticket) == world.alone(request)
            assert ticket.record is not None
            assert {chunk.tier for chunk in ticket.record.chunks} == {"host"}
        assert resident(engine) == 4
        engine.forget([ChunkId(repr(list(CHUNKS[2])))], ["a"])
        assert resident(engine) == 3
        at_rest(engine, world)


def test_a_request_that_fails_or_is_cancelled_leaves_no_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = world.request(LONG, "weave", 0.3)
    with Engine(world.decoder, SHARED) as engine:
        with monkeypatch.context() as broken:
            broken.setattr("kvweave.fuse.prefill.order_fusion", _fail)
            with pytest.raises(ValueError, match="on purpose"):
                answer(engine.submit(request))
        assert resident(engine) == 0  # pages that nobody filled are free
        at_rest(engine, world)
        ticket = engine.submit(replace(request, sampling=replace(request.sampling, max_tokens=99)))
        next(ticket)
        ticket.cancel()
        ticket.wait()
        until(lambda: engine.stats()["running"] == 0)
        at_rest(engine, world)
        assert resident(engine) == len(set(LONG))
        assert answer(engine.submit(request)) == world.alone(request)


def _fail(*_: object) -> None:
    raise ValueError("on purpose")


def test_bytes_that_left_the_pool_while_a_request_waited_are_brought_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was opened for chunks that were resident then, and are not when it takes its step."""
    request = world.request([CHUNKS[0], CHUNKS[2]], "weave", 0.3)
    want = world.alone(request)
    with Engine(world.decoder, SHARED) as engine:
        assert answer(engine.submit(request)) == want
        admit = engine._pages.admit

        def forgetful(sequence):  # type: ignore[no-untyped-def]
            while engine._chunks is not None and engine._chunks.shrink():
                pass
            return admit(sequence)

        monkeypatch.setattr(engine._pages, "admit", forgetful)
        ticket = engine.submit(request)
        assert answer(ticket) == want
        assert ticket.record is not None
        assert {chunk.tier for chunk in ticket.record.chunks} == {"host"}
        at_rest(engine, world)


def test_guesses_and_close_calls_go_through_shared_chunks(world: World) -> None:
    request = world.request(LONG, "weave", 0.3)
    want = world.alone(request)
    exact = [c.token_id for c in alone(world.decoder, replace(request, fused=None))]
    with Engine(world.decoder, SHARED) as engine:
        held = engine.submit(request, held=True)
        until(lambda: held.timeline.prefilled_s is not None)
        held.release()
        assert answer(held) == want
        dropped = engine.submit(request, held=True)
        until(lambda: dropped.timeline.prefilled_s is not None)
        dropped.cancel()
        assert request.fused is not None
        doubtful = replace(request, fused=replace(request.fused, close_call=1e9))
        assert answer(engine.submit(doubtful)) == exact
        assert engine.stats()["fused_close_calls"] == 1
        at_rest(engine, world)


def test_pages_of_chunks_are_written_once(world: World) -> None:
    """Whatever is recomputed or moved for a prompt."""
    with Engine(world.decoder, SHARED) as engine:
        answer(engine.submit(world.request(LONG, "reuse", 0.0)))

        def pages() -> torch.Tensor:
            assert engine._chunks is not None
            at = [page for chunk in engine._chunks for page in chunk.pages]
            pool = engine._pages.empty_kv().pool
            return torch.stack([pool.keys[:, at], pool.values[:, at]]).clone()

        before = engine.run_alone(pages)
        for ratio in (0.2, 0.6, 1.0):
            answer(engine.submit(world.request(LONG[::-1], "weave", ratio)))
        assert torch.equal(engine.run_alone(pages), before)


def test_chunks_that_are_deleted_before_their_first_pass_are_the_requests_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was let in, and has pages for them."""
    request = world.request([CHUNKS[2], CHUNKS[0]], "weave", 0.3)
    want, take = world.alone(request), OwnSteps._take

    def deleted(self, sequence, meanwhile=None):  # type: ignore[no-untyped-def]
        engine._prefixes.forget_all("")
        return take(self, sequence, meanwhile)

    with Engine(world.decoder, SHARED) as engine:
        monkeypatch.setattr(OwnSteps, "_take", deleted)
        assert answer(engine.submit(request)) == want
        assert resident(engine) == 0
        at_rest(engine, world)


@pytest.mark.parametrize("pages", [8, 9, 10, 12])
@pytest.mark.parametrize("background", [False, True])
def test_a_pool_that_has_room_for_a_copy_alone_gives_that(
    world: World, pages: int, background: bool
) -> None:
    """Also to a request in idle time, which would wait for ever."""
    request = replace(world.request(list(CHUNKS), "weave", 0.3), background=background)
    request = replace(request, sampling=replace(request.sampling, max_tokens=1))
    cfg = replace(SHARED, page_tokens=8, pool_tokens=8 * pages)
    with Engine(world.decoder, cfg) as engine:
        ticket = engine.submit(request)
        until(lambda: ticket.is_done)
        assert answer(ticket) == world.alone(replace(request, background=False))
        at_rest(engine, world)
