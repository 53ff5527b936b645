"""Fused prompts in the common steps: cut into slices, beside others, answered as alone."""

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from kvweave.engine import fused_prompts
from kvweave.engine.drafts import AnswerDrafts, Drafts
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest, LoadCost, Ticket
from kvweave.engine.sequence import EngineSequence
from kvweave.fuse.record import JOINED, STREAMED
from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows
from worlds.engine import SMALL, VOCABULARY, alone, ids, plain, with_chunks
from worlds.fused import CHUNKS, PREAMBLE, QUESTION, World, answer, at_rest, shuffled
from worlds.serving import GatedDecoder

SLICED = ["reuse", "weave", "fusionrag", "qcfuse", "epic", "prophetkv", "random"]
LONG = [*CHUNKS, CHUNKS[2], CHUNKS[0], CHUNKS[2]]  # 87 tokens


class Watched(Decoder):
    """Notes how many rows of each sequence every pass had."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.spec, decoder.weights)
        self.passes: list[list[int]] = []

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        self.passes.append([len(rows.positions) for rows in batch])
        return super().forward(batch)


def make_request(world: World, rng: random.Random) -> EngineRequest:
    """Fused by some strategy, exact or plain."""
    kind = rng.random()
    if kind < 0.6:
        strategy = rng.choice([*SLICED, "cacheblend"])
        ratio = 0.0 if strategy == "reuse" else rng.choice([0.2, 0.5, 1.0])
        request = world.request(shuffled(rng), strategy, ratio)
        return replace(request, use_tree=rng.random() < 0.3)
    if kind < 0.8:
        return with_chunks(PREAMBLE, shuffled(rng), ids(rng, 4))
    return plain(ids(rng, rng.randint(1, 30)), max_tokens=12)


def at_once(request: EngineRequest) -> EngineRequest:
    """The same, known to find its bytes in memory."""
    assert request.fused is not None
    return replace(request, fused=replace(request.fused, expected=LoadCost(0.0, 1.0)))


def answer_alone(world: World, request: EngineRequest) -> list[int]:
    if request.fused is not None:
        return world.alone(request)
    return [choice.token_id for choice in alone(world.decoder, request)]


@pytest.mark.parametrize("strategy", SLICED)
def test_a_fused_prompt_in_slices_is_answered_as_alone(world: World, strategy: str) -> None:
    """With one chunk that is not stored in the middle, beside a decode."""
    chunks = [CHUNKS[2], ids(random.Random(1), 9), CHUNKS[0], CHUNKS[3]]
    request = world.request(chunks, strategy, 0.0 if strategy == "reuse" else 0.4)
    want = world.alone(request)
    with Engine(world.decoder, replace(SMALL, step_rows=5)) as engine:
        beside = engine.submit(plain([1, 2, 3], max_tokens=200))
        next(beside)
        ticket = engine.submit(request)
        assert answer(ticket) == want
        record = ticket.record
        assert record is not None
        assert (record.strategy, record.way) == (strategy, "joined")
        assert [chunk.state.value for chunk in record.chunks][1] == "computed"
        assert sum(record.counts.values()) == len(request.prompt_ids)
        assert record.stages.compute > 0
        assert record.stages.load > 0
        assert ticket.timeline.shared
        beside.cancel()
        assert beside.wait(30)
        at_rest(engine, world)


@pytest.mark.parametrize("seed", range(12))
def test_fused_prompts_on_a_random_schedule_are_answered_as_alone(world: World, seed: int) -> None:
    """Sliced, beside others, preempted, held, released, dropped, beside cancelled neighbours."""
    rng = random.Random(seed)
    cfg = replace(
        SMALL,
        step_rows=rng.choice([2, 5, 50]),
        alone_rows=rng.choice([3, 32]),
        guess_rows=rng.choice([2, 40]),
        guess_alone_rows=40 if seed % 2 else None,
        pool_tokens=4 * rng.choice([20, 40, 256]),
    )
    wanted: list[tuple[Ticket, EngineRequest]] = []
    with Engine(world.decoder, cfg) as engine:
        for _ in range(10):
            request, kind = make_request(world, rng), rng.random()
            if kind < 0.2:
                engine.submit(request, held=rng.random() < 0.5).cancel()
            elif kind < 0.5:
                guess = engine.submit(request, held=True)
                wanted.append((guess, request))
                if rng.random() < 0.5:
                    guess.release()
            else:
                wanted.append((engine.submit(request), request))
        for ticket, _ in wanted:
            ticket.release()
        for ticket, request in wanted:
            assert answer(ticket) == answer_alone(world, request)
        at_rest(engine, world)


@pytest.mark.parametrize("ratio", [0.4, 1.0])
def test_a_long_fused_prefill_never_holds_a_decode_up_for_more_than_a_slice(
    world: World, ratio: float
) -> None:
    """At ratio 1 rows are cut anywhere; below it a step has at most one chunk's rows too many."""
    decoder, budget = Watched(world.decoder), 8
    request = world.request(LONG, "weave", ratio)
    want = world.alone(request)
    with Engine(decoder, replace(SMALL, step_rows=budget)) as engine:
        beside = engine.submit(plain([1, 2, 3], max_tokens=400))
        next(beside)
        ticket = engine.submit(request)
        assert answer(ticket) == want
        beside.cancel()
        assert beside.wait(30)
        at_rest(engine, world)
    sliced = [rows for rows in decoder.passes if len(rows) == 2 and rows[1] > 1]
    assert len(sliced) > 3, "it was computed in one go"
    assert all(rows[0] == 1 for rows in sliced), "a decode waited"
    assert ticket.record is not None
    computed = ticket.record.counts["recomputed"] + ticket.record.counts["computed"]
    assert sum(rows[1] for rows in sliced) in (computed, computed - 1)  # the last may be alone
    most = max(chunk.recomputed for chunk in ticket.record.chunks)
    assert max(rows[1] for rows in sliced) <= (budget - 1 if ratio == 1.0 else most)


def test_a_lone_prompt_is_one_pass_of_its_own(world: World) -> None:
    decoder = Watched(world.decoder)
    request = world.request(LONG)
    with Engine(decoder, SMALL) as engine:
        ticket = engine.submit(request)
        assert answer(ticket) == world.alone(request)
        assert ticket.record is not None
        assert ticket.record.way == "streamed"
        assert {rows for (rows,) in decoder.passes} == {1}, "common steps had its answer alone"
        at_rest(engine, world)


def test_each_mode_answers_as_alone_and_is_counted(world: World) -> None:
    lone, whole = world.request(LONG), world.request(LONG, "cacheblend")
    with Engine(world.decoder, SMALL) as engine:
        for request, mode in ((lone, "joined"), (whole, "whole"), (lone, "streamed")):
            ticket = engine.submit(request, held=mode == "joined")  # a guess can end between slices
            while mode == "joined" and ticket.timeline.prefilled_s is None:
                engine.run_alone(lambda: None)
            ticket.release()
            assert answer(ticket) == world.alone(request)
            assert ticket.record is not None
            assert ticket.record.way == mode
        stats = engine.stats()
        assert [stats[f"fused_{mode}"] for mode in ("joined", "whole", "streamed")] == [1, 1, 1]
        assert stats["fused_begun"] == 3
        at_rest(engine, world)


def test_a_fused_prompt_that_loses_its_pages_between_two_slices_is_prepared_again(
    world: World,
) -> None:
    request = world.request(CHUNKS, "weave", 1.0)  # 43 rows of which each step has one
    first = plain(ids(random.Random(4), 20), max_tokens=60)
    cfg = replace(SMALL, pool_tokens=4 * 24, step_rows=2)
    with Engine(world.decoder, cfg) as engine:
        beside = engine.submit(first)
        next(beside)
        ticket = engine.submit(request)
        assert answer(ticket) == world.alone(request)
        assert ticket.timeline.preempted > 0
        stats = engine.stats()  # the last time it may have been alone
        assert stats["fused_begun"] == 1 + ticket.timeline.preempted
        assert stats["fused_joined"] + stats["fused_streamed"] == 1, "one of them was completed"
        assert list(beside) == alone(world.decoder, first)[1:]
        at_rest(engine, world)


def test_a_fused_guess_cancelled_between_two_slices_gives_everything_back(world: World) -> None:
    gated = GatedDecoder(world.decoder)
    cfg = replace(SMALL, alone_rows=6, guess_rows=6)
    with Engine(gated, cfg) as engine:
        ticket = engine.submit(world.request(LONG, "weave", 1.0), held=True)
        gated.permits.release(2)
        while gated.steps < 2:
            time.sleep(0.001)
        ticket.cancel()
        gated.permits.release(100)
        assert ticket.wait(30)
        assert not answer(ticket)
        assert gated.steps <= 3, "it went on"
        assert (engine.stats()["fused_begun"], engine.stats()["fused_joined"]) == (1, 0)
        assert ticket.timeline.wasted_tokens
        assert engine.stats()["pages_used"] == 0
        at_rest(engine, world)


def test_a_held_fused_prompt_is_computed_a_few_rows_at_a_time(world: World) -> None:
    decoder = Watched(world.decoder)
    request = world.request(LONG, "weave", 1.0)
    with Engine(decoder, replace(SMALL, guess_rows=7)) as engine:
        guess = engine.submit(request, held=True)
        while guess.timeline.prefilled_s is None:
            engine.run_alone(lambda: None)
        assert {rows for (rows,) in decoder.passes[:-1]} == {7}
        guess.release()
        assert answer(guess) == world.alone(request)
        at_rest(engine, world)


class Poisoned(Decoder):
    """Fails in the middle of a pass that has a certain token in it."""

    def __init__(self, decoder: Decoder, poison: int) -> None:
        super().__init__(decoder.spec, decoder.weights)
        self._poison = poison
        self._is_ill = False
        self.broken: list[bool] = []  # passes that failed: did something move in them

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        self._is_ill = any(self._poison in rows.token_ids for rows in batch)
        try:
            return super().forward(batch)
        finally:
            if self._is_ill:
                self.broken.append(any(rows.hook is not None for rows in batch))
            self._is_ill = False

    def finish(self, layer: int, h: Tensor, attended: Tensor) -> Tensor:
        if self._is_ill and layer == 1:
            raise RuntimeError("this token breaks everything")
        return super().finish(layer, h, attended)


def test_a_neighbour_that_breaks_a_step_changes_no_fused_answer(world: World) -> None:
    request, others = at_once(world.request(LONG)), plain([1, 2, 3], max_tokens=30)
    want, told = world.alone(request), [choice.token_id for choice in alone(world.decoder, others)]
    known = {*request.prompt_ids, *want, *others.prompt_ids, *told}
    poison = next(token for token in range(VOCABULARY) if token not in known)
    decoder = Poisoned(world.decoder, poison)
    with Engine(decoder, replace(SMALL, step_rows=50)) as engine:
        beside = engine.submit(others)
        next(beside)
        tickets = engine.run_alone(lambda: [engine.submit(r) for r in (request, plain([poison]))])
        with pytest.raises(RuntimeError, match="breaks everything"):
            answer(tickets[1])
        assert answer(tickets[0]) == want
        assert answer(beside) == told[1:]
        assert decoder.broken == [True, False], "together, then the one that is to blame alone"
        at_rest(engine, world)


def test_a_guess_counts_the_rows_it_computed_and_none_it_reused(world: World) -> None:
    request = world.request([CHUNKS[2], CHUNKS[0]], "reuse", 0.0)
    with Engine(world.decoder, SMALL) as engine:
        for is_right in (True, False):
            guess = engine.submit(request, held=True)
            deadline_s = time.monotonic() + 30
            while guess.timeline.prefilled_s is None and time.monotonic() < deadline_s:
                time.sleep(0.005)
            if is_right:
                guess.release()
                assert len(answer(guess)) == 6
            else:
                guess.cancel()
                assert guess.wait(30)
            counted = guess.timeline.saved_tokens, guess.timeline.wasted_tokens
            assert guess.record is not None
            computed = guess.record.counts["computed"]
            assert 0 < computed < len(request.prompt_ids)
            assert counted == ((computed, 0) if is_right else (0, computed))
        at_rest(engine, world)


@pytest.mark.parametrize("front", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["weave", "fusionrag", "epic", "reuse"])
def test_slices_behind_an_exact_front_are_answered_as_one_pass(
    world: World, strategy: str, front: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = random.Random(front).sample(CHUNKS, 4)
    request = world.request(chunks, strategy, 0.0 if strategy == "reuse" else 0.4)
    request = replace(request, use_tree=True)
    cfg = replace(SMALL, step_rows=3, alone_rows=3, pool_tokens=4 * 60)
    answers = {}
    for way in (STREAMED, JOINED):
        in_slices = way == JOINED
        monkeypatch.setattr(fused_prompts, "runs_in_slices", lambda *_, it=in_slices, **__: it)
        with Engine(world.decoder, cfg) as engine:
            list(engine.submit(with_chunks(PREAMBLE, chunks[:front], QUESTION, max_tokens=1)))
            beside = [engine.submit(plain([1, 2, 3 + i], max_tokens=60)) for i in range(2)]
            ticket = engine.submit(request)
            answers[way] = answer(ticket)
            assert ticket.record is not None
            assert ticket.record.way == way
            exact = [chunk.state.value for chunk in ticket.record.chunks].count("exact")
            assert exact >= front, "the tree had them"
            for other in beside:
                other.cancel()
                assert other.wait(30)
            at_rest(engine, world)
    assert answers[JOINED] == answers[STREAMED]


def test_an_answer_that_lost_its_pages_drafts_nothing_while_its_prompt_is_woven_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slices have rows of the prompt: none of them is the last token of the answer."""

    def draft_all(_: Drafts, answers: Sequence[AnswerDrafts], __: int) -> None:
        for each in answers:
            if each.found is not None:
                each.choose(len(each.found.token_ids))

    monkeypatch.setattr(Drafts, "share_out", draft_all)
    request = world.request(CHUNKS, "weave", 1.0)
    request = replace(request, sampling=replace(request.sampling, max_tokens=100))
    beside = plain(ids(random.Random(4), 20), max_tokens=400)
    # 32 rows a step: of the prompt, the last slice has one
    with Engine(world.decoder, replace(SMALL, step_rows=32, copy_tokens=7)) as engine:
        other = engine.submit(beside)
        next(other)
        ticket = engine.submit(request)
        lost: list[EngineSequence] = []

        def take_pages() -> None:
            for each in list(engine._scheduler.running):
                drafts = each.drafts
                is_answer = each.request.fused is not None and each.answered > 3
                if is_answer and drafts is not None and len(drafts.token_ids):
                    engine._scheduler._preempt(each, {})
                    lost.append(each)

        answered = []
        for choice in ticket:
            answered.append(choice.token_id)
            if not lost:
                engine.run_alone(take_pages)
        other.cancel()
        assert lost, "it had a draft at hand"
        assert answered == world.alone(request)
        at_rest(engine, world)
