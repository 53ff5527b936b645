"""Requests that arrive together compute what they have in common once."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows
from worlds.engine import SMALL, alone, ids, plain, until, with_chunks
from worlds.serving import GatedDecoder

RNG = random.Random(0)
PREAMBLE = ids(RNG, 6)
A, B, C, D = (ids(RNG, n) for n in (9, 14, 7, 11))
PATH = len(PREAMBLE) + len(A) + len(B) + len(C)


class CountingDecoder(GatedDecoder):
    """Counts rows, and breaks on a certain question."""

    POISON = (96, 95, 96)

    def __init__(self, decoder: Decoder, permits: int = 9999) -> None:
        super().__init__(decoder)
        self.rows: list[list[int]] = []  # of each step, by sequence
        if permits:
            self.permits.release(permits)

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        if any(tuple(rows.token_ids[-3:]) == self.POISON for rows in batch):
            raise RuntimeError("this question breaks everything")
        self.rows.append([len(rows.token_ids) for rows in batch])
        return super().forward(batch)


def question(seed: int, length: int = 4) -> tuple[int, ...]:
    return ids(random.Random(seed), length)


def four(chunks: Sequence[Sequence[int]] = (A, B, C)) -> list[EngineRequest]:
    return [with_chunks(PREAMBLE, chunks, question(n), max_tokens=5) for n in range(4)]


def together(engine: Engine, requests: Sequence[EngineRequest]) -> list[Ticket]:
    """The engine hears of all before it takes a step."""
    return engine.run_alone(lambda: [engine.submit(request) for request in requests])


def exact(ticket: Ticket) -> int:
    assert ticket.record is not None
    return ticket.record.counts["exact"]


def at_rest(engine: Engine) -> None:
    engine.run_alone(engine.check_integrity)
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0


@pytest.mark.parametrize("alone_rows", [8, 45, 500])
def test_four_requests_over_the_same_documents_compute_them_once(
    decoder: Decoder, alone_rows: int
) -> None:
    counting, requests = CountingDecoder(decoder), four()
    with Engine(counting, replace(SMALL, alone_rows=alone_rows)) as engine:
        tickets = together(engine, requests)
        assert [list(ticket) for ticket in tickets] == [alone(decoder, r) for r in requests]
        assert [exact(ticket) for ticket in tickets] == [0, PATH, PATH, PATH]
        assert sum(map(sum, counting.rows)) == PATH + 4 * (4 + 5 - 1)
        if alone_rows > PATH + 4:  # else the step was full: there was nothing to hold back
            assert engine.stats()["prefixes_shared"] == 3
        at_rest(engine)


def test_the_same_prompt_many_times_is_computed_once(decoder: Decoder) -> None:
    """As one question with several answers asks for it."""
    request = with_chunks(PREAMBLE, [A, B], question(1), max_tokens=3)
    with Engine(decoder, replace(SMALL, alone_rows=64)) as engine:
        tickets = together(engine, [request] * 5)
        assert all(list(ticket) == alone(decoder, request) for ticket in tickets)
        assert [exact(ticket) for ticket in tickets] == [0, 29, 29, 29, 29]
        assert engine.stats()["prefixes_shared"] == 4


def test_paths_that_part_are_shared_up_to_there(decoder: Decoder) -> None:
    requests = [*four((A, B, C))[:2], *four((A, B, D))[2:], plain(question(9, 20), max_tokens=5)]
    with Engine(decoder, SMALL) as engine:
        tickets = together(engine, requests)
        assert [list(ticket) for ticket in tickets] == [alone(decoder, r) for r in requests]
        both = len(PREAMBLE) + len(A) + len(B)
        assert [exact(ticket) for ticket in tickets] == [0, PATH, both, both + len(D), 0]
        at_rest(engine)


def test_only_the_parts_that_are_to_be_kept_are_found_by_the_next(decoder: Decoder) -> None:
    requests = [replace(request, num_kept=1) for request in four()]
    kept = len(PREAMBLE) + len(A)
    with Engine(decoder, SMALL) as engine:
        tickets = together(engine, requests)
        assert [list(ticket) for ticket in tickets] == [alone(decoder, r) for r in requests]
        assert [exact(ticket) for ticket in tickets] == [0, kept, kept, kept]
        at_rest(engine)


def test_those_who_wait_hold_up_no_one_behind_them(decoder: Decoder) -> None:
    gated = CountingDecoder(decoder, permits=0)
    other = plain(question(9, 3), max_tokens=1)
    with Engine(gated, replace(SMALL, alone_rows=PATH)) as engine:
        tickets = together(engine, [*four((A, B)), other])
        gated.permits.release(999)
        assert list(tickets[-1]) == alone(decoder, other)
        assert all(len(list(ticket)) == 5 for ticket in tickets[:-1])
        assert gated.rows[:2] == [[33, 3], [1, 4, 3]], "and the others in the second step"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_when_the_first_is_cancelled_the_next_goes_on(decoder: Decoder, steps: int) -> None:
    gated, requests = CountingDecoder(decoder, permits=0), four()
    with Engine(gated, replace(SMALL, alone_rows=8)) as engine:
        tickets = together(engine, requests)
        gated.permits.release(steps)
        until(lambda: gated.steps == steps)
        tickets[0].cancel()
        gated.permits.release(999)
        assert [list(t) for t in tickets[1:]] == [alone(decoder, r) for r in requests[1:]]
        assert exact(tickets[1]) < PATH
        assert [exact(ticket) for ticket in tickets[2:]] == [PATH, PATH]
        at_rest(engine)


def test_when_the_first_fails_the_next_goes_on(decoder: Decoder) -> None:
    """It breaks in the step that would have offered all."""
    requests = four()
    bad = replace(requests[0], question=CountingDecoder.POISON)
    with Engine(CountingDecoder(decoder), replace(SMALL, alone_rows=500)) as engine:
        tickets = together(engine, [bad, *requests[1:]])
        with pytest.raises(RuntimeError, match="breaks everything"):
            list(tickets[0])
        assert [list(t) for t in tickets[1:]] == [alone(decoder, r) for r in requests[1:]]
        assert [exact(ticket) for ticket in tickets[1:]] == [0, PATH, PATH]
        at_rest(engine)


@pytest.mark.parametrize(
    "cfg",
    [
        replace(SMALL, tree_share=0.02),  # room for a part of the path
        replace(SMALL, tree_share=0.0),
        replace(SMALL, pool_tokens=4 * 20),  # two at most fit, and preempt each other
    ],
    ids=["refused", "no tree", "small pool"],
)
def test_what_the_tree_refuses_is_waited_for_by_none(decoder: Decoder, cfg: EngineConfig) -> None:
    requests = [replace(r, sampling=replace(r.sampling, max_tokens=30)) for r in four()]
    with Engine(decoder, replace(cfg, alone_rows=8)) as engine:
        tickets = together(engine, requests)
        assert [list(ticket) for ticket in tickets] == [alone(decoder, r) for r in requests]
        at_rest(engine)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_when_a_document_is_deleted_meanwhile_none_waits_for_it(
    decoder: Decoder, steps: int
) -> None:
    gated, requests = CountingDecoder(decoder, permits=0), four()
    with Engine(gated, replace(SMALL, alone_rows=8)) as engine:
        tickets = together(engine, requests)
        gated.permits.release(steps)
        until(lambda: gated.steps == steps)
        gated.permits.release(999)
        engine.forget([requests[0].chunks[1].id])
        assert [list(ticket) for ticket in tickets] == [alone(decoder, r) for r in requests]
        assert max(exact(ticket) for ticket in tickets) <= len(PREAMBLE) + len(A)
        at_rest(engine)


def test_a_guess_or_the_background_is_waited_for_by_none(decoder: Decoder) -> None:
    gated, (first, second, *_) = CountingDecoder(decoder, permits=0), four()
    with Engine(gated, replace(SMALL, alone_rows=8, guess_rows=4, background_rows=4)) as engine:
        guess = engine.submit(first, held=True)
        gated.permits.release(2)
        until(lambda: gated.steps == 2)
        real = engine.submit(second)
        gated.permits.release(999)
        assert list(real) == alone(decoder, second)
        assert exact(real) == len(PREAMBLE), "what the guess had offered until then"
        guess.release()
        assert list(guess) == alone(decoder, first)
        behind = engine.submit(replace(first, chunks=first.chunks[1:], background=True))
        assert list(engine.submit(second)) == alone(decoder, second)
        assert behind.wait(10)
        assert engine.stats()["prefixes_shared"] == 0
        at_rest(engine)


@pytest.mark.parametrize("seed", range(25))
def test_a_crowd_over_few_documents_gets_the_answers_of_each_alone(
    decoder: Decoder, seed: int
) -> None:
    rng = random.Random(seed)
    cfg = replace(
        SMALL,
        pool_tokens=4 * rng.choice([26, 256]),
        tree_share=rng.choice([0.1, 0.5]),
        alone_rows=rng.choice([4, 16]),
    )
    with Engine(decoder, cfg) as engine:
        wanted = []
        for _ in range(12):
            chunks = [A, B, C, D][: rng.randint(1, 4)]
            request = with_chunks(PREAMBLE, chunks, question(rng.randrange(99)), max_tokens=6)
            request = replace(request, use_tree=rng.random() < 0.9)
            ticket = engine.submit(request, held=rng.random() < 0.3)
            if rng.random() < 0.3:
                ticket.cancel()
                continue
            ticket.release()
            wanted.append((ticket, request))
            if rng.random() < 0.1:
                engine.forget([request.chunks[0].id])
        for ticket, request in wanted:
            assert list(ticket) == alone(decoder, request)
        at_rest(engine)
