"""Fused prompts that are ordered and not waited for, and common steps between them.

A CPU has computed what it is told when it is told. Where a test says so, passes are taken for not
through until somebody waits for them, as on a GPU.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvweave.engine.engine import Engine
from kvweave.engine.fused_prompts import OrderedPrompt
from kvweave.engine.own_steps import OwnSteps
from kvweave.engine.request import EngineRequest, LoadCost, Ticket
from kvweave.engine.runner import Runner
from kvweave.engine.scheduler import StepSlice
from kvweave.engine.sequence import EngineSequence
from kvweave.fuse.fuse import Fused, OrderedFusion
from worlds.engine import SMALL, alone, ids, plain, until
from worlds.fused import CHUNKS, World, answer, at_rest, shuffled

pytestmark = pytest.mark.usefixtures("by_the_mean")

CFG = replace(SMALL, share_chunks=True, overlap_steps=True, prompts_per_step=1)


@pytest.fixture
def on_its_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pass is through before it is waited for."""
    with monkeypatch.context() as patched:
        patched.setattr(OrderedFusion, "is_through", property(lambda _: False))
        yield


def fused(world: World, rng: random.Random, max_tokens: int = 6) -> EngineRequest:
    request = world.request(shuffled(rng), "weave", rng.choice([0.3, 0.6]))
    return replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))


def bring_chunks(engine: Engine, world: World) -> None:
    """All chunks lie in shared pages: the prompts that follow need not bring any."""
    request = world.request(list(CHUNKS), "weave", 0.3)
    answer(engine.submit(request))
    answer(engine.submit(world.request(list(CHUNKS[::-1]), "weave", 0.3)))


def overlap_of(engine: Engine) -> OwnSteps:
    return engine._own_steps


@pytest.mark.usefixtures("on_its_way")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pages", [24, 60, 256])
@pytest.mark.parametrize("per_step", [1, 2, 5])
def test_a_crowd_gets_the_answers_of_each_alone(
    world: World, seed: int, pages: int, per_step: int
) -> None:
    """Also in pools so small that requests lose their pages while prompts are on their way."""
    rng = random.Random(seed)
    requests = [fused(world, rng, rng.randint(1, 9)) for _ in range(14)]
    requests += [plain(ids(rng, rng.randint(1, 30)), max_tokens=12) for _ in range(4)]
    rng.shuffle(requests)
    want = [
        world.alone(one) if one.fused else [c.token_id for c in alone(world.decoder, one)]
        for one in requests
    ]
    cfg = replace(CFG, pool_tokens=4 * pages, prompts_per_step=per_step)
    with Engine(world.decoder, cfg) as engine:
        tickets = [engine.submit(request) for request in requests]
        assert [answer(ticket) for ticket in tickets] == want
        at_rest(engine, world)
        for ticket, request in zip(tickets, requests, strict=True):
            assert ticket.record is not None
            assert ticket.record.strategy == ("weave" if request.fused else "full")
        assert engine.stats()["fused_streamed"] >= 14


@pytest.mark.usefixtures("on_its_way")
def test_the_next_prompt_and_a_step_are_ordered_before_a_token_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    told: list[str] = []
    numbers: dict[object, str] = {}

    def name(sequence: object) -> str:
        return numbers.setdefault(sequence, "ABCDEFGH"[len(numbers)])

    order, finish, own = Runner.order, OwnSteps._finish, OwnSteps._take

    def ordering(self: Runner, slices: list[StepSlice]) -> object:  # type: ignore[type-arg]
        told.append("step")
        return order(self, slices)

    def finishing(self: OwnSteps, ordered: OrderedPrompt) -> None:
        told.append(f"{name(ordered.sequence)}'s token")
        finish(self, ordered)

    def beginning(self: OwnSteps, sequence: object, meanwhile: object = None) -> object:
        told.append(f"{name(sequence)} begins")
        made = own(self, sequence, meanwhile)  # type: ignore[arg-type]
        told.append(f"{name(sequence)} is ordered")
        return made

    with Engine(world.decoder, replace(CFG, max_running=9)) as engine:
        bring_chunks(engine, world)
        first = engine.submit(plain(ids(rng, 5), max_tokens=60))
        next(first)
        requests = [fused(world, rng, 1) for _ in range(3)]
        monkeypatch.setattr(Runner, "order", ordering)
        monkeypatch.setattr(OwnSteps, "_finish", finishing)
        monkeypatch.setattr(OwnSteps, "_take", beginning)
        tickets = engine.run_alone(lambda: [engine.submit(request) for request in requests])
        for ticket in tickets:
            answer(ticket)
        first.cancel()
    assert told[:12] == [
        "A begins", "step", "A is ordered",
        "B begins", "step", "A's token", "B is ordered",
        "C begins", "step", "B's token", "C is ordered",
        "C's token",
    ]  # fmt: skip


@pytest.mark.parametrize("per_step", [1, 2, 4])
def test_so_many_prompts_are_computed_between_two_steps(world: World, per_step: int) -> None:
    rng = random.Random(2)
    cfg = replace(CFG, prompts_per_step=per_step, max_running=16)
    with Engine(world.decoder, cfg) as engine:
        bring_chunks(engine, world)
        beside = engine.submit(plain(ids(rng, 5), max_tokens=200))
        next(beside)
        before = overlap_of(engine).num_steps
        requests = [fused(world, rng, 1) for _ in range(12)]
        tickets = engine.run_alone(lambda: [engine.submit(request) for request in requests])
        for ticket in tickets:
            answer(ticket)
        steps = overlap_of(engine).num_steps - before
        beside.cancel()
        assert 12 // per_step - 1 <= steps <= 12 // per_step + 1


@pytest.mark.usefixtures("on_its_way")
def test_a_prompt_that_is_cancelled_on_its_way_ends_without_a_token(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    requests = [fused(world, rng) for _ in range(4)]
    want = [world.alone(request) for request in requests]
    own = OwnSteps._take
    cancelled: list[Ticket] = []

    def leaving(self: OwnSteps, sequence, meanwhile=None):  # type: ignore[no-untyped-def]
        ordered = own(self, sequence, meanwhile)
        if ordered is not None and not cancelled:
            cancelled.append(sequence.ticket)
            sequence.ticket.cancel()
        return ordered

    with Engine(world.decoder, CFG) as engine:
        bring_chunks(engine, world)
        monkeypatch.setattr(OwnSteps, "_take", leaving)
        tickets = engine.run_alone(lambda: [engine.submit(request) for request in requests])
        for ticket, tokens in zip(tickets, want, strict=True):
            assert answer(ticket) == ([] if ticket in cancelled else tokens)
        assert len(cancelled) == 1
        at_rest(engine, world)
        assert engine.stats()["requests_aborted"] == 1


@pytest.mark.usefixtures("on_its_way")
def test_a_pass_that_fails_ends_its_own_request_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(4)
    requests = [fused(world, rng) for _ in range(4)]
    want = [world.alone(request) for request in requests]
    finish = OrderedFusion.finish
    failed: list[OrderedFusion] = []

    def failing(self: OrderedFusion) -> Fused:
        if not failed:
            failed.append(self)
            raise RuntimeError("on purpose")
        return finish(self)

    with Engine(world.decoder, CFG) as engine:
        bring_chunks(engine, world)
        monkeypatch.setattr(OrderedFusion, "finish", failing)
        tickets = engine.run_alone(lambda: [engine.submit(request) for request in requests])
        ended = []
        for ticket, tokens in zip(tickets, want, strict=True):
            try:
                assert answer(ticket) == tokens
            except RuntimeError as error:
                ended.append(str(error))
        assert ended == ["on purpose"]
        at_rest(engine, world)
        assert engine.stats()["requests_failed"] == 1


@pytest.mark.usefixtures("on_its_way")
def test_a_job_finds_the_device_at_rest(world: World) -> None:
    rng = random.Random(5)
    with Engine(world.decoder, CFG) as engine:
        bring_chunks(engine, world)
        tickets = [engine.submit(fused(world, rng)) for _ in range(8)]
        seen = [engine.run_alone(lambda: overlap_of(engine)._prompt) for _ in range(20)]
        for ticket in tickets:
            answer(ticket)
        assert seen == [None] * 20
        at_rest(engine, world)


@pytest.mark.usefixtures("on_its_way")
def test_who_draws_its_tokens_is_not_kept_waiting_for_a_pass(world: World) -> None:
    """Steps with it are taken by themselves, in turn with prompts."""
    rng = random.Random(6)
    with Engine(world.decoder, CFG) as engine:
        bring_chunks(engine, world)
        drawing = engine.submit(plain(ids(rng, 5), max_tokens=12, temperature=1.0, seed=1))
        next(drawing)
        before = overlap_of(engine).num_steps
        requests = [fused(world, rng, 3) for _ in range(6)]
        tickets = engine.run_alone(lambda: [engine.submit(request) for request in requests])
        assert len(answer(drawing)) == 11
        assert overlap_of(engine).num_steps == before
        for ticket, request in zip(tickets, requests, strict=True):
            assert answer(ticket) == world.alone(request)


@pytest.mark.usefixtures("on_its_way")
def test_an_engine_that_is_closed_ends_what_is_on_its_way(world: World) -> None:
    rng = random.Random(7)
    with Engine(world.decoder, CFG) as engine:
        bring_chunks(engine, world)
        tickets = [engine.submit(fused(world, rng, 50)) for _ in range(6)]
        until(lambda: overlap_of(engine).num_steps > 1)
    assert all(ticket.is_done for ticket in tickets)
    assert world.store.num_pinned() == 0


@pytest.mark.usefixtures("on_its_way")
def test_guesses_are_not_computed_between_prompts(world: World) -> None:
    rng = random.Random(8)
    with Engine(world.decoder, CFG) as engine:
        bring_chunks(engine, world)
        guess = engine.submit(plain(ids(rng, 40), max_tokens=2), held=True)
        tickets = [engine.submit(fused(world, rng)) for _ in range(4)]
        for ticket in tickets:
            answer(ticket)
        until(lambda: guess.timeline.prefilled_s is not None)
        guess.release()
        assert len(answer(guess)) == 2
        at_rest(engine, world)


@pytest.mark.usefixtures("on_its_way")
def test_what_a_prompt_takes_in_company_is_not_taken_for_its_own(world: World) -> None:
    """Prices are not learnt from it."""
    rng = random.Random(9)
    with Engine(world.decoder, CFG) as engine:
        bring_chunks(engine, world)
        alone = engine.submit(fused(world, rng, 1))
        answer(alone)
        requests = [fused(world, rng, 1) for _ in range(3)]
        tickets = engine.run_alone(lambda: [engine.submit(request) for request in requests])
        for ticket in tickets:
            answer(ticket)
        assert not alone.timeline.shared
        assert all(ticket.timeline.shared for ticket in tickets)


@pytest.mark.usefixtures("on_its_way")
@pytest.mark.parametrize("most", [2, 3])
def test_another_tenant_waits_while_all_that_run_are_on_their_way(
    world: World, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """None of them may leave for it."""
    request = fused(world, random.Random(9), 3)
    mine, other = replace(request, namespace="a"), replace(request, namespace="b")
    want, late, scoring = world.alone(request), [], OwnSteps._work_while_scoring

    def hearing(self: OwnSteps, own: EngineSequence) -> None:
        if not late:
            late.append(engine.submit(other))
            engine._worker._handle_messages()
        scoring(self, own)

    with Engine(world.decoder, replace(CFG, max_running=most)) as engine:
        for tenant in (mine, other):
            answer(engine.submit(tenant))
            answer(engine.submit(tenant))
        monkeypatch.setattr(OwnSteps, "_work_while_scoring", hearing)
        tickets = engine.run_alone(lambda: [engine.submit(mine) for _ in range(most)])
        until(lambda: bool(late))
        assert [answer(ticket) for ticket in (*tickets, *late)] == [want] * (most + 1)
        at_rest(engine, world)


@pytest.mark.usefixtures("on_its_way")
@pytest.mark.parametrize("kind", ["held", "cacheblend", "not there yet", "epic"])
def test_a_token_does_not_wait_for_a_step_that_scores_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nor for one that waits for bytes, or that nobody waits for."""
    told: list[str] = []
    own, prefilled = OwnSteps._take, OwnSteps._end_step

    def name(sequence: EngineSequence) -> str:
        return "first" if sequence.ticket is tickets[0] else "second"

    def beginning(self, sequence, meanwhile=None):  # type: ignore[no-untyped-def]
        told.append(f"{name(sequence)} begins")
        if len(tickets) == 1:  # it comes behind the first
            tickets.append(engine.submit(second, held=kind == "held"))
            engine._worker._handle_messages()
        return own(self, sequence, meanwhile)

    def answering(self, sequence, *how):  # type: ignore[no-untyped-def]
        told.append(f"{name(sequence)} answers")
        prefilled(self, sequence, *how)

    second = world.request([CHUNKS[2]], kind if kind in ("cacheblend", "epic") else "weave", 0.3)
    assert second.fused is not None
    second = replace(second, fused=replace(second.fused, expected=LoadCost(0.0, 1.0)))
    tickets: list[Ticket] = []
    with Engine(world.decoder, CFG) as engine:
        bring_chunks(engine, world)
        if kind == "not there yet":
            second = replace(second, namespace="another")
        monkeypatch.setattr(OwnSteps, "_take", beginning)
        monkeypatch.setattr(OwnSteps, "_end_step", answering)
        first = fused(world, random.Random(11), 1)
        engine.run_alone(lambda: tickets.append(engine.submit(first)))
        answer(tickets[0])
        until(lambda: len(tickets) == 2)
        tickets[1].release()
        answer(tickets[1])
    assert told.index("first answers") < told.index("second begins")


@pytest.mark.usefixtures("on_its_way")
def test_a_prompt_on_its_way_is_one_that_is_not_computed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speculation begins when there are few of them."""
    seen: list[int] = []
    own = OwnSteps.take

    def looking(self: OwnSteps, sequence: EngineSequence) -> None:
        own(self, sequence)
        seen.append(engine.pending_prefills())

    with Engine(world.decoder, CFG) as engine:
        bring_chunks(engine, world)
        monkeypatch.setattr(OwnSteps, "take", looking)
        answer(engine.submit(fused(world, random.Random(12), 1)))
        assert engine.pending_prefills() == 0
    assert seen == [1]


@pytest.mark.usefixtures("on_its_way")
def test_guesses_are_not_let_in_instead_of_a_step(world: World) -> None:
    rng = random.Random(13)
    with Engine(world.decoder, replace(CFG, prompts_per_step=3, max_running=16)) as engine:
        bring_chunks(engine, world)
        beside = engine.submit(plain(ids(rng, 5), max_tokens=200))
        next(beside)
        requests = [(fused(world, rng, 1), n > 0) for n in range(4)]
        before = overlap_of(engine).num_steps
        tickets = engine.run_alone(
            lambda: [engine.submit(request, held=held) for request, held in requests]
        )
        answer(tickets[0])
        assert overlap_of(engine).num_steps == before + 1
        for ticket in (beside, *tickets[1:]):
            ticket.cancel()
