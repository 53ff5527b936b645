"""Requests in idle time, forced answers, and what the model thought of each token."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvweave.engine.engine import Engine
from kvweave.engine.page_manager import make_pool
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.runner import Runner
from kvweave.errors import RequestError
from kvweave.model.decoder import Decoder
from kvweave.model.recorded_decode import RecordedDecode
from kvweave.model.rows import Rows
from worlds.engine import SMALL, alone, ids, plain, tokens, until, with_chunks
from worlds.fused import CHUNKS, QUESTION, World, answer, at_rest
from worlds.recordings import without_kernels
from worlds.serving import GatedDecoder

IDLE = replace(SMALL, background_rows=5)


class WatchedSteps(GatedDecoder):
    """Remembers the rows of each step by sequence."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self.rows: list[list[int]] = []

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        self.rows.append([len(rows.token_ids) for rows in batch])
        return super().forward(batch)


def in_background(request: EngineRequest) -> EngineRequest:
    return replace(request, background=True)


def test_a_background_request_answers_as_any_other(decoder: Decoder) -> None:
    rng = random.Random(1)
    request = with_chunks(ids(rng, 6), [ids(rng, 9), ids(rng, 12)], ids(rng, 4))
    with Engine(decoder, IDLE) as engine:
        ticket = engine.submit(in_background(request))
        assert list(ticket) == alone(decoder, request)
        again = engine.submit(request)
        assert list(again) == alone(decoder, request)
        assert again.record is not None
        assert again.record.counts["exact"] == 27, "what it computed is in the tree"
        stats = engine.stats()
        assert (stats["background_finished"], stats["requests_finished"]) == (1, 1)
        assert stats["tokens_answered"] == 8
        engine.run_alone(engine.check_integrity)


def test_who_arrives_waits_for_no_more_than_one_short_step(decoder: Decoder) -> None:
    steps = WatchedSteps(decoder)
    rng = random.Random(2)
    idle, new = plain(ids(rng, 17), max_tokens=3), plain(ids(rng, 40), max_tokens=4)
    with Engine(steps, IDLE) as engine:
        behind = engine.submit(in_background(idle))
        until(lambda: len(steps.rows) == 1)  # its first step is under way
        assert not engine.is_busy
        assert engine.pending_prefills() == 0
        ticket = engine.submit(new)
        assert engine.pending_prefills() == 1
        steps.permits.release(99)
        assert list(ticket) == alone(decoder, new)
        assert list(behind) == alone(decoder, idle)
        engine.run_alone(engine.check_integrity)
        assert engine.stats()["steps_given_up"] == 1
    with_it = [[5], [32], [8], [1], [1], [1], [5], [5], [5], [2], [1], [1]]
    assert steps.rows == with_it, "the first is given up, and taken again"


def test_a_step_in_idle_time_is_given_up_behind_a_layer(decoder: Decoder) -> None:
    steps = WatchedSteps(decoder)
    steps.permits.release(99)
    rng = random.Random(2)
    idle, new = plain(ids(rng, 17), max_tokens=3), plain(ids(rng, 40), max_tokens=4)
    other = plain(ids(rng, 9), max_tokens=2)
    tickets: list[Ticket] = []
    with Engine(steps, IDLE) as engine:
        heard = steps.on_layer

        def arrive() -> None:
            """On the engine thread, in the second step: somebody behind it, then somebody else."""
            if len(steps.rows) == 2 and len(tickets) == 1:
                tickets.append(engine.submit(in_background(other)))
                heard()  # one more in idle time is no reason to give up
                tickets.append(engine.submit(new))
            heard()

        steps.on_layer = arrive
        tickets.append(engine.submit(in_background(idle)))
        until(lambda: len(tickets) == 3)
        assert list(tickets[2]) == alone(decoder, new)
        assert list(tickets[0]) == alone(decoder, idle)
        assert list(tickets[1]) == alone(decoder, other)
        assert engine.stats()["steps_given_up"] == 1
        assert engine.stats()["requests_failed"] == engine.stats()["background_failed"] == 0
        engine.run_alone(engine.check_integrity)
    assert steps.rows[:4] == [[5], [5], [32], [8]], "the second step was given up"
    assert steps.rows[7:9] == [[5], [5]], "and is taken again"


@pytest.mark.parametrize("steps_before", [1, 2, 5])
def test_a_cancelled_background_request_ends_between_two_steps(
    decoder: Decoder, steps_before: int
) -> None:
    steps = WatchedSteps(decoder)
    with Engine(steps, IDLE) as engine:
        ticket = engine.submit(in_background(plain(ids(random.Random(3), 17), max_tokens=200)))
        steps.permits.release(steps_before)
        until(lambda: len(steps.rows) == steps_before + 1)
        ticket.cancel()
        steps.permits.release(1)
        assert ticket.wait(10)
        engine.run_alone(engine.check_integrity)
        assert len(steps.rows) == steps_before + 1
        assert engine.stats()["background_aborted"] == 1
        assert engine.stats()["pages_used"] == 0


def test_a_background_request_that_waits_is_cancelled_at_once(decoder: Decoder) -> None:
    steps = WatchedSteps(decoder)
    with Engine(steps, IDLE) as engine:
        first = engine.submit(plain([1, 2, 3], max_tokens=200))
        behind = engine.submit(in_background(plain([4, 5], max_tokens=200)))
        steps.permits.release(3)
        until(lambda: len(steps.rows) == 4)
        behind.cancel()
        steps.permits.release(1)
        assert behind.wait(10)
        first.cancel()
        steps.permits.release(9)
        assert first.wait(10)
        engine.run_alone(engine.check_integrity)
        assert engine.stats()["background"] == 0


def test_the_background_loses_its_pages_first_and_answers_all_the_same(decoder: Decoder) -> None:
    rng = random.Random(4)
    idle = plain(ids(rng, 40), max_tokens=12)
    new = [plain(ids(rng, 20), max_tokens=4) for _ in range(3)]
    steps = WatchedSteps(decoder)
    with Engine(steps, replace(IDLE, pool_tokens=4 * 24, tree_share=0.0)) as engine:
        behind = engine.submit(in_background(idle))
        steps.permits.release(4)
        until(lambda: len(steps.rows) == 5)
        tickets = [engine.submit(request) for request in new]
        steps.permits.release(999)
        assert [list(ticket) for ticket in tickets] == [alone(decoder, r) for r in new]
        assert list(behind) == alone(decoder, idle)
        assert behind.timeline.preempted > 0
        assert [ticket.timeline.preempted for ticket in tickets] == [0, 0, 0]
        engine.run_alone(engine.check_integrity)


@pytest.mark.parametrize("seed", range(20))
def test_a_crowd_with_some_in_the_background_gets_the_answers_of_each_alone(
    decoder: Decoder, seed: int
) -> None:
    rng = random.Random(seed)
    chunks = [ids(rng, rng.randint(1, 13)) for _ in range(4)]
    with Engine(decoder, replace(IDLE, pool_tokens=4 * rng.choice([28, 256]))) as engine:
        wanted = []
        for _ in range(12):
            request = with_chunks(
                chunks[0], [rng.choice(chunks) for _ in range(3)], ids(rng, rng.randint(1, 6))
            )
            request = replace(request, background=rng.random() < 0.5)
            if not request.background and rng.random() < 0.3:
                engine.submit(request, held=True).cancel()
            elif rng.random() < 0.2:
                engine.submit(request).cancel()
            else:
                wanted.append((engine.submit(request), request))
        for ticket, request in wanted:
            assert list(ticket) == alone(decoder, request)
        engine.run_alone(engine.check_integrity)
        assert engine.stats()["running"] == engine.stats()["background"] == 0


@pytest.mark.parametrize("strategy", ["weave", "epic", "cacheblend"])
def test_a_fused_request_in_the_background_is_woven_as_alone(world: World, strategy: str) -> None:
    request = world.request(CHUNKS, strategy)
    rng = random.Random(5)
    others = [plain(ids(rng, 20), max_tokens=9) for _ in range(3)]
    with Engine(world.decoder, replace(IDLE, pool_tokens=4 * 28)) as engine:
        behind = engine.submit(in_background(request))
        tickets = [engine.submit(other) for other in others]
        assert [list(ticket) for ticket in tickets] == [alone(world.decoder, o) for o in others]
        assert answer(behind) == world.alone(request)
        assert behind.record is not None
        assert behind.record.way == ("whole" if strategy == "cacheblend" else "joined")
        dropped = engine.submit(in_background(request))
        dropped.cancel()
        assert dropped.wait(10)
        at_rest(engine, world)


def test_a_prepared_prompt_in_the_background_gives_way_between_two_slices(world: World) -> None:
    steps = WatchedSteps(world.decoder)
    request, new = world.request(CHUNKS, "epic", 0.5), plain(QUESTION, max_tokens=2)
    with Engine(steps, IDLE) as engine:
        behind = engine.submit(in_background(request))
        until(lambda: len(steps.rows) >= 1)
        ticket = engine.submit(new)
        steps.permits.release(99)
        assert list(ticket) == alone(world.decoder, new)
        assert answer(behind) == world.alone(request)
        at_rest(engine, world)
    assert steps.rows[:4] == [[5], [5], [1], [5]]


def test_a_background_request_is_not_held(decoder: Decoder) -> None:
    with Engine(decoder, IDLE) as engine, pytest.raises(RequestError, match="cannot be held"):
        engine.submit(in_background(plain([1, 2])), held=True)


# ---- forced and watched


def thoughts(decoder: Decoder, request: EngineRequest, answered: Sequence[int]) -> Tensor:
    """[tokens, V] log-probabilities of one plain pass over prompt and answer."""
    decoder = Decoder(decoder.spec, decoder.weights)
    prompt = request.prompt_ids
    row_ids = [*prompt, *answered[:-1]]
    wanted = range(len(prompt) - 1, len(row_ids))
    kv = decoder.new_kv(len(row_ids))
    logits = decoder.forward([Rows(row_ids, range(len(row_ids)), kv, list(wanted))])
    return logits.log_softmax(-1).float()


def test_a_forced_answer_is_what_was_forced_and_what_the_model_thinks_of_it(
    decoder: Decoder,
) -> None:
    rng = random.Random(6)
    forced = ids(rng, 7)
    request = with_chunks(ids(rng, 6), [ids(rng, 9)], ids(rng, 4), max_tokens=2)
    request = replace(request, forced=forced, watched=5, eos_ids=frozenset(forced))
    want = thoughts(decoder, request, forced)
    drawn = plain(ids(rng, 11), temperature=0.7, seed=3, max_tokens=9)
    with Engine(decoder, IDLE) as engine:
        beside = engine.submit(drawn)
        tickets = [engine.submit(request), engine.submit(in_background(request))]
        tickets.append(engine.submit(request, held=True))
        tickets[-1].release()
        for ticket in tickets:
            assert tokens(ticket) == list(forced), "however long, and whatever ends answers"
            assert len(ticket.distributions) == 5
            torch.testing.assert_close(torch.stack(ticket.distributions), want[:5])
            assert ticket.distributions[0].dtype == torch.float32
        assert list(beside) == alone(decoder, drawn)
        engine.run_alone(engine.check_integrity)


def test_a_forced_token_is_reported_on_as_a_drawn_one(decoder: Decoder) -> None:
    request = plain([5, 6, 7], max_tokens=4, logprobs=2)
    request = replace(request, forced=tuple(c.token_id for c in alone(decoder, request)))
    with Engine(decoder, IDLE) as engine:
        assert list(engine.submit(request)) == alone(decoder, request)


def test_what_is_watched_changes_no_answer_and_is_there_with_its_token(decoder: Decoder) -> None:
    request = replace(plain(ids(random.Random(7), 12), max_tokens=6), watched=99)
    with Engine(decoder, IDLE) as engine:
        ticket = engine.submit(request)
        got = []
        for choice in ticket:
            got.append(choice)
            assert int(ticket.distributions[len(got) - 1].argmax()) == choice.token_id
        assert got == alone(decoder, request)
        assert len(ticket.distributions) == 6
        assert not engine.submit(replace(request, watched=0)).distributions


def test_what_is_watched_survives_the_loss_of_its_pages(decoder: Decoder) -> None:
    rng = random.Random(8)
    requests = [replace(plain(ids(rng, 20), max_tokens=30), watched=30) for _ in range(6)]
    with Engine(decoder, replace(IDLE, pool_tokens=4 * 24)) as engine:
        tickets = [engine.submit(request) for request in requests]
        got = [tokens(ticket) for ticket in tickets]
        assert engine.stats()["preemptions"] > 0
    for request, ticket, answered in zip(requests, tickets, got, strict=True):
        want = thoughts(decoder, request, answered)
        torch.testing.assert_close(torch.stack(ticket.distributions), want)


def test_a_recorded_step_gives_what_the_model_thought(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory that the next step writes over: what is kept is a copy."""
    without_kernels(monkeypatch)
    rng = random.Random(9)
    requests = [replace(plain(ids(rng, 9), max_tokens=8), watched=8) for _ in range(3)]
    pool = make_pool(IDLE, decoder)
    recorded = RecordedDecode(decoder, pool, 64)
    with Engine(decoder, IDLE, pool=pool, runner=Runner(decoder, recorded)) as engine:
        tickets = [engine.submit(request) for request in requests]
        got = [tokens(ticket) for ticket in tickets]
        assert recorded.num_played > 0
    for request, ticket, answered in zip(requests, tickets, got, strict=True):
        torch.testing.assert_close(
            torch.stack(ticket.distributions), thoughts(decoder, request, answered)
        )


@pytest.mark.parametrize("strategy", ["weave", "cacheblend"])
def test_a_fused_answer_is_forced_and_watched_too(world: World, strategy: str) -> None:
    request = replace(world.request(CHUNKS, strategy), watched=3)
    forced = replace(request, forced=(3, 1, 4, 1, 5))
    with Engine(world.decoder, IDLE) as engine:
        ticket = engine.submit(request)
        assert answer(ticket) == world.alone(request)
        for place, choice in enumerate(world.alone(request)[:3]):
            assert int(ticket.distributions[place].argmax()) == choice
        again = engine.submit(in_background(forced))
        assert answer(again) == [3, 1, 4, 1, 5]
        assert len(again.distributions) == 3
        torch.testing.assert_close(again.distributions[0], ticket.distributions[0])
        at_rest(engine, world)


def test_what_cannot_be_forced_or_watched_is_refused_at_once(decoder: Decoder) -> None:
    with Engine(decoder, IDLE) as engine:
        with pytest.raises(RequestError, match="`forced` has token ids outside"):
            engine.submit(replace(plain([1]), forced=(1, 97)))
        with pytest.raises(RequestError, match="watched must be 0 or more"):
            engine.submit(replace(plain([1]), watched=-1))
