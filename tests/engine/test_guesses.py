"""Speculations in the engine: few rows at a time, behind everybody else, and not in the queue."""

import random
import threading

import pytest
import torch

from kvweave.engine.config import EngineConfig, for_device
from kvweave.engine.engine import Engine
from kvweave.engine.scheduler import Scheduler, Seq
from kvweave.errors import ConfigError
from kvweave.model.decoder import Decoder
from worlds.engine import SMALL, alone, ids, plain, tokens, with_chunks

CFG = EngineConfig(page_tokens=4, step_rows=8, alone_rows=32, guess_rows=4)


def make_scheduler() -> Scheduler[Seq]:
    """Over a pool without end."""

    def grow(seq: Seq, pages: int) -> bool:
        seq.pages += pages
        return True

    return Scheduler(
        CFG,
        lambda seq: (0, seq.known),
        lambda seq: grow(seq, 99),
        grow,
        lambda _: None,
        lambda _: False,
    )


def step(scheduler: Scheduler[Seq]) -> list[tuple[int, int]]:
    """(arrival, rows) of one step."""
    works = scheduler.next_step()
    for seq, rows in works:
        seq.computed += rows
    return [(work.seq.arrival, work.num_rows) for work in works]


def test_a_guess_is_computed_a_few_rows_at_a_time() -> None:
    scheduler = make_scheduler()
    scheduler.add(Seq(1, known=10, held=True))
    assert [step(scheduler) for _ in range(4)] == [[(1, 4)], [(1, 4)], [(1, 2)], []]


def test_a_guess_that_is_released_hurries() -> None:
    scheduler = make_scheduler()
    guess = Seq(1, known=40, held=True)
    scheduler.add(guess)
    step(scheduler)
    scheduler.release(guess)
    assert step(scheduler) == [(1, 32)]


def test_a_guess_comes_behind_who_arrived_later() -> None:
    scheduler = make_scheduler()
    scheduler.add(Seq(1, known=10, held=True))
    step(scheduler)
    scheduler.add(Seq(2, known=64))
    assert step(scheduler) == [(1, 4), (2, 28)]  # it was running before the other came in
    assert step(scheduler) == [(2, 32)]
    assert step(scheduler) == [(2, 4), (1, 2)]


def test_the_rows_of_a_guess_follow_the_device() -> None:
    cpu = for_device(EngineConfig(), torch.device("cpu")).guess_rows
    cuda = for_device(EngineConfig(), torch.device("cuda")).guess_rows
    assert cpu is not None
    assert cuda is not None
    assert cpu < cuda
    assert for_device(CFG, torch.device("cuda")).guess_rows == CFG.guess_rows
    with pytest.raises(ConfigError, match="guess_rows must be at least 1"):
        EngineConfig(guess_rows=0)


def test_pages_follow_the_device_unless_they_are_given() -> None:
    sizes = [for_device(EngineConfig(), torch.device(d)).page_tokens for d in ("cpu", "cuda")]
    assert sizes == [32, 64]
    assert for_device(CFG, torch.device("cuda")).page_tokens == CFG.page_tokens
    with pytest.raises(ConfigError, match="at least one page"):
        EngineConfig(page_tokens=64, pool_tokens=32)


def test_prompts_that_wait_are_pending_and_those_that_were_cancelled_are_not(
    decoder: Decoder,
) -> None:
    rng = random.Random(1)
    with Engine(decoder, SMALL) as engine:
        started, go = threading.Event(), threading.Event()

        def hold() -> None:
            started.set()
            go.wait(10)

        holding = threading.Thread(target=lambda: engine.run_alone(hold))
        holding.start()
        assert started.wait(10)
        tickets = [engine.submit(plain(ids(rng, 20), max_tokens=2)) for _ in range(3)]
        assert engine.pending_prefills() == 3
        tickets[1].cancel()
        assert engine.pending_prefills() == 2
        go.set()
        holding.join()
        assert [len(tokens(ticket)) for ticket in tickets] == [2, 0, 2]
        assert engine.pending_prefills() == 0


def test_what_a_guess_saved_and_wasted_is_counted_and_said(decoder: Decoder) -> None:
    rng = random.Random(2)
    preamble, chunks, question = ids(rng, 7), [ids(rng, 9), ids(rng, 10)], ids(rng, 5)
    request = with_chunks(preamble, chunks, question)
    with Engine(decoder, SMALL) as engine:
        wrong = engine.submit(request, held=True)
        while wrong.timeline.prefilled_s is None:
            engine.run_alone(lambda: None)
        wrong.cancel()
        assert wrong.wait(10)
        assert wrong.timeline.wasted_tokens == len(question)  # the rest is in the tree
        right = engine.submit(request, held=True)
        while right.timeline.prefilled_s is None:
            engine.run_alone(lambda: None)
        right.release()
        assert tokens(right) == [choice.token_id for choice in alone(decoder, request)]
        assert right.timeline.saved_tokens == len(question)
        stats = engine.stats()
        assert (stats["speculation_right"], stats["speculation_wrong"]) == (1, 1)
        assert stats["speculation_saved_tokens"] == stats["speculation_wasted_tokens"] == 5
        engine.run_alone(engine.check_integrity)


def test_steps_are_longer_where_a_short_one_leaves_the_device_idle() -> None:
    cpu, cuda = (for_device(EngineConfig(), torch.device(d)) for d in ("cpu", "cuda"))
    for name in ("step_rows", "alone_rows"):
        assert getattr(cuda, name) > getattr(cpu, name)
        assert getattr(for_device(CFG, torch.device("cuda")), name) == getattr(CFG, name)
