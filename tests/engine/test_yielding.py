"""A step that nobody waits for ends between two layers when it stands in the way: guesses here.
Idle time is in test_background.py."""

import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from kvweave.engine.chunk_loader import LoadedPrompt
from kvweave.engine.common_steps import Urgency, is_more_urgent
from kvweave.engine.config import EngineConfig, for_device
from kvweave.engine.engine import Engine
from kvweave.engine.page_manager import make_pool
from kvweave.engine.request import Ticket
from kvweave.engine.runner import Runner
from kvweave.engine.scheduler import MOST_GIVEN_UP
from kvweave.kernels.recording import count_refusals
from kvweave.model.decoder import Decoder
from kvweave.model.recorded_decode import RecordedDecode
from kvweave.model.rows import Rows
from worlds.engine import SMALL, alone, ids, plain, tokens, until, with_chunks
from worlds.recordings import without_kernels

CFG = replace(SMALL, alone_rows=64, guess_rows=4, guess_alone_rows=64)
LONG = plain(ids(random.Random(1), 40), max_tokens=3)


class StoppingDecoder(Decoder):
    """Stops in the first layer of its first pass until it is told to go on."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.spec, decoder.weights)
        self.stopped, self.goes_on = threading.Event(), threading.Event()
        self.layers: list[int] = []  # that were finished
        self.rows: list[int] = []  # of every pass

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        self.rows.append(sum(len(rows.token_ids) for rows in batch))
        return super().forward(batch)

    def finish(self, layer: int, h: Tensor, attended: Tensor) -> Tensor:
        if not self.stopped.is_set():
            self.stopped.set()
            assert self.goes_on.wait(30)
        finished = super().finish(layer, h, attended)
        self.layers.append(layer)
        return finished


def test_a_guess_that_is_not_wanted_ends_between_two_layers(decoder: Decoder) -> None:
    stopping = StoppingDecoder(decoder)
    with Engine(stopping, CFG) as engine:
        guess = engine.submit(LONG, held=True)
        assert stopping.stopped.wait(30)
        guess.cancel()
        stopping.goes_on.set()
        assert guess.wait(30)
        assert stopping.rows == [40], "in one step, because nothing else was to be computed"
        assert stopping.layers == [], "it was given up in the layer that it was in"
        assert engine.stats()["steps_given_up"] == 1
        assert engine.stats()["requests_failed"] == 0
        assert engine.stats()["pages_used"] == 0
        assert tokens(engine.submit(LONG)) == [c.token_id for c in alone(decoder, LONG)]
        engine.run_alone(engine.check_integrity)


def test_a_guess_gives_way_to_a_request_and_goes_on_beside_it(decoder: Decoder) -> None:
    stopping = StoppingDecoder(decoder)
    other = plain(ids(random.Random(2), 9), max_tokens=5)
    with Engine(stopping, CFG) as engine:
        guess = engine.submit(LONG, held=True)
        assert stopping.stopped.wait(30)
        ticket = engine.submit(other)
        stopping.goes_on.set()
        assert list(ticket) == alone(decoder, other)
        guess.release()
        assert list(guess) == alone(decoder, LONG)
        assert engine.stats()["steps_given_up"] == 1
        assert stopping.rows[0] == 40
        assert stopping.rows[1] <= 9 + CFG.guess_rows, "beside others a guess has few rows"
        engine.run_alone(engine.check_integrity)


def test_a_guess_that_was_right_is_not_given_up(decoder: Decoder) -> None:
    stopping = StoppingDecoder(decoder)
    with Engine(stopping, CFG) as engine:
        guess = engine.submit(LONG, held=True)
        assert stopping.stopped.wait(30)
        guess.release()
        ticket = engine.submit(plain([1, 2, 3], max_tokens=2))
        stopping.goes_on.set()
        assert list(guess) == alone(decoder, LONG)
        assert len(list(ticket)) == 2
        assert engine.stats()["steps_given_up"] == 0


def test_a_guess_gives_way_to_no_other_guess_and_to_nothing_of_idle_time(decoder: Decoder) -> None:
    stopping = StoppingDecoder(decoder)
    with Engine(stopping, CFG) as engine:
        guess = engine.submit(LONG, held=True)
        assert stopping.stopped.wait(30)
        others = [
            engine.submit(plain([4, 5, 6], max_tokens=2), held=True),
            engine.submit(replace(plain([1, 2, 3], max_tokens=2), background=True)),
        ]
        stopping.goes_on.set()
        until(lambda: guess.timeline.prefilled_s is not None)
        assert engine.stats()["steps_given_up"] == 0
        for ticket in (guess, *others):
            ticket.cancel()
            assert ticket.wait(30)


def test_idle_time_gives_way_to_a_guess(decoder: Decoder) -> None:
    stopping = StoppingDecoder(decoder)
    with Engine(stopping, replace(CFG, background_rows=20)) as engine:
        behind = engine.submit(replace(LONG, background=True))
        assert stopping.stopped.wait(30)
        guess = engine.submit(plain([4, 5, 6], max_tokens=2), held=True)
        stopping.goes_on.set()
        assert list(behind) == alone(decoder, LONG)
        assert engine.stats()["steps_given_up"] == 1
        assert stopping.rows[:3] == [20, 3, 20]
        guess.cancel()
        assert guess.wait(30)


def test_what_gave_way_too_often_runs_through(decoder: Decoder) -> None:
    """Else nothing would ever be computed in idle time where requests come all the time."""
    tickets: list[Ticket] = []
    own = Decoder(decoder.spec, decoder.weights)
    with Engine(own, replace(CFG, background_rows=20)) as engine:
        heard = own.on_layer

        def arrive() -> None:
            """Somebody asks in every layer of idle time."""
            if engine._common_steps._tickets:
                tickets.append(engine.submit(plain([7, 8], max_tokens=1)))
            heard()

        own.on_layer = arrive
        behind = engine.submit(replace(LONG, background=True))
        assert list(behind) == alone(decoder, LONG)
        assert engine.stats()["steps_given_up"] == len(tickets)
        steps = -(-40 // 20) + 2  # of the prompt, and of all tokens but the first
        assert len(tickets) == MOST_GIVEN_UP * steps
        assert all(len(list(ticket)) == 1 for ticket in tickets)
        engine.run_alone(engine.check_integrity)


def test_a_guess_is_not_lost_with_its_neighbour(decoder: Decoder) -> None:
    stopping = StoppingDecoder(decoder)
    other = plain(ids(random.Random(4), 9), max_tokens=3)
    guesses: list[Ticket] = []
    with Engine(stopping, CFG) as engine:
        engine.run_alone(lambda: guesses.extend(engine.submit(r, held=True) for r in (LONG, other)))
        assert stopping.stopped.wait(30)
        guesses[0].cancel()
        stopping.goes_on.set()
        until(lambda: guesses[1].timeline.prefilled_s is not None)
        assert stopping.rows == [49], "both in one step"
        assert engine.stats()["steps_given_up"] == 0
        guesses[1].release()
        assert list(guesses[1]) == alone(decoder, other)


@pytest.mark.parametrize(("held", "given_up"), [(True, 1), (False, 0)])
def test_a_guess_gives_way_to_a_job_and_idle_time_does_not(
    decoder: Decoder, held: bool, given_up: int
) -> None:
    stopping = StoppingDecoder(decoder)
    with Engine(stopping, replace(CFG, background_rows=20)) as engine:
        ticket = engine.submit(replace(LONG, background=not held), held=held)
        assert stopping.stopped.wait(30)
        engine._worker.post(lambda: None)
        stopping.goes_on.set()
        until(lambda: len(stopping.rows) > 1)
        assert engine.stats()["steps_given_up"] == given_up
        ticket.cancel()
        assert ticket.wait(30)


def test_who_is_more_urgent_whom(decoder: Decoder) -> None:
    with Engine(decoder, CFG) as engine:
        asked = engine.submit(LONG)
        guess = engine.submit(LONG, held=True)
        idle = engine.submit(replace(LONG, background=True))
        sequences = engine.run_alone(lambda: dict(engine._lifecycle.sequences))

        def loaded(ticket: Ticket) -> LoadedPrompt:
            return LoadedPrompt(sequences[ticket], RuntimeError(), 0.0)

        for news in (guess, loaded(guess)):
            assert is_more_urgent(news, Urgency.IDLE_TIME)
            assert not is_more_urgent(news, Urgency.GUESSED)
        assert is_more_urgent(loaded(asked), Urgency.GUESSED)
        assert not is_more_urgent(idle, Urgency.IDLE_TIME)
        for ticket in (asked, guess, idle):
            ticket.cancel()
            assert ticket.wait(30)
        assert not is_more_urgent(guess, Urgency.IDLE_TIME), "it is over"


def test_a_closed_engine_does_not_wait_for_a_guess(decoder: Decoder) -> None:
    stopping = StoppingDecoder(decoder)
    engine = Engine(stopping, CFG)
    ticket = engine.submit(LONG, held=True)
    assert stopping.stopped.wait(30)
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: engine._inbox.is_closed)
    stopping.goes_on.set()
    closing.join(30)
    assert not closing.is_alive()
    assert stopping.layers == [], "it was given up in the layer that it was in"
    assert ticket.wait(30)


def test_a_step_that_gives_way_is_not_recorded(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What interrupts a recording would end it for good."""
    without_kernels(monkeypatch)
    cfg = replace(SMALL, background_rows=50)
    pool = make_pool(cfg, decoder)
    recorded = RecordedDecode(decoder, pool, 64)
    idle = replace(plain(ids(random.Random(1), 9), max_tokens=6), background=True)
    with Engine(decoder, cfg, pool=pool, runner=Runner(decoder, recorded)) as engine:
        assert list(engine.submit(idle)) == alone(decoder, idle)
        assert recorded.num_played == 0
        again = replace(idle, background=False)
        assert list(engine.submit(again)) == alone(decoder, again)
        assert recorded.num_played > 0
        assert count_refusals(recorded.refusals)["recordings_failed"] == 0


def test_where_guesses_are_short_each_step_is_computed_to_its_end(decoder: Decoder) -> None:
    """As on a CPU: what it computes is kept, and nobody waits long for it."""
    stopping = StoppingDecoder(decoder)
    rng = random.Random(3)
    preamble, chunk = ids(rng, 6), ids(rng, 9)
    with Engine(stopping, replace(CFG, guess_alone_rows=None, guess_rows=16)) as engine:
        guess = engine.submit(with_chunks(preamble, [chunk], ids(rng, 8)), held=True)
        assert stopping.stopped.wait(30)
        guess.cancel()
        stopping.goes_on.set()
        assert guess.wait(30)
        ticket = engine.submit(with_chunks(preamble, [chunk], ids(rng, 3)))
        tokens(ticket)
        assert ticket.record is not None
        assert ticket.record.counts["exact"] == 15
        assert engine.stats()["steps_given_up"] == 0


def test_how_long_a_wrong_guess_stands_in_the_way(decoder: Decoder) -> None:
    with Engine(decoder, replace(CFG, guess_alone_rows=4)) as engine:
        assert engine.guess_boundary_s(0.5, 10.0) == 2.0, "a step"
    with Engine(decoder, replace(CFG, guess_rows=8)) as engine:
        layers = decoder.spec.num_layers
        assert engine.guess_boundary_s(100.0, 10.0) == 10.0 * 3 / layers, "some layers"
        assert engine.guess_boundary_s(0.01, 10.0) == 0.08, "never more than a step"


def test_only_on_a_device_guesses_are_longer_alone() -> None:
    assert for_device(EngineConfig(), "cpu").guess_alone_rows == 128
    assert for_device(EngineConfig(guess_rows=7), "cuda").guess_alone_rows == 7
    assert for_device(EngineConfig(), "cuda").guess_alone_rows == 8192
