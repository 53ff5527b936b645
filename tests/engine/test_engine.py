"""The engine answers as the plain loop does, whatever else it computes."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch import Tensor

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.sampling import Sampling
from kvweave.errors import ConfigError, EngineClosed, ModelError, RequestError
from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows
from worlds.engine import SMALL, alone, ids, plain, tokens, with_chunks
from worlds.serving import GatedDecoder

TINY = replace(SMALL, pool_tokens=4 * 24)  # pages run out


class BreakingDecoder(Decoder):
    """Fails whenever a certain token is in the batch."""

    POISON = 96

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.spec, decoder.weights)

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        if any(self.POISON in rows.token_ids for rows in batch):
            raise RuntimeError("this token breaks everything")
        return super().forward(batch)


def make_request(rng: random.Random, chunks: Sequence[Sequence[int]]) -> EngineRequest:
    """Any request: of parts or plain, greedy or drawn."""
    if rng.random() < 0.3:
        drawn = {"temperature": 0.8, "seed": rng.randrange(99)}
        rare = {"presence_penalty": 0.7, "frequency_penalty": 0.4}
        how = rng.choice([{}, drawn, rare, {**drawn, **rare}])
        return plain(ids(rng, rng.randint(1, 30)), max_tokens=rng.randint(1, 12), **how)
    chosen = [rng.choice(chunks) for _ in range(rng.randint(0, 4))]
    return with_chunks(
        chunks[0],
        chosen,
        ids(rng, rng.randint(1, 6)),
        use_tree=rng.random() < 0.7,
        max_tokens=rng.randint(1, 12),
    )


@pytest.mark.parametrize("seed", range(100))
def test_answers_on_a_random_schedule_are_those_of_each_request_alone(
    decoder: Decoder, seed: int
) -> None:
    """Batched, preempted, beside cancelled neighbours, speculated: 100 schedules."""
    rng = random.Random(seed)
    chunks = [ids(rng, rng.randint(1, 13)) for _ in range(4)]
    cfg = replace(
        rng.choice([SMALL, TINY]),
        host_tokens=rng.choice([0, 100]),
        tree_share=rng.choice([0.0, 0.3, 0.6]),
        step_rows=rng.choice([4, 8, 50]),
        copy_tokens=rng.choice([0, 3, 15]),
        guess_rows=2 if seed % 3 else None,
        guess_alone_rows=50 if seed % 2 else None,
    )
    with Engine(decoder, cfg) as engine:
        wanted: list[tuple[Ticket, EngineRequest]] = []
        for _ in range(8):
            request = make_request(rng, chunks)
            if rng.random() < 0.25:  # a guess: held, then released or dropped
                guess = engine.submit(request, held=True)
                if rng.random() < 0.5:
                    guess.cancel()
                    continue
                guess.release()
                wanted.append((guess, request))
            elif rng.random() < 0.25:  # a neighbour that leaves early
                engine.submit(request).cancel()
            else:
                wanted.append((engine.submit(request), request))
        for ticket, request in wanted:
            assert list(ticket) == alone(decoder, request)
        engine.run_alone(engine.check_integrity)
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_pages_that_run_out_change_no_answer(decoder: Decoder) -> None:
    rng = random.Random(1)
    requests = [plain(ids(rng, 20), max_tokens=30) for _ in range(6)]
    with Engine(decoder, TINY) as engine:
        tickets = [engine.submit(request) for request in requests]
        got = [list(ticket) for ticket in tickets]
        assert engine.stats()["preemptions"] > 0
        assert sum(ticket.timeline.preempted for ticket in tickets) > 0
        assert engine.stats()["pages_used"] == 0
    assert got == [alone(decoder, request) for request in requests]


def test_an_answer_may_fill_the_whole_pool(decoder: Decoder) -> None:
    rng = random.Random(2)
    preamble, chunk, question = ids(rng, 5), ids(rng, 10), ids(rng, 3)
    request = with_chunks(preamble, [chunk], question, max_tokens=200)
    with Engine(decoder, TINY) as engine:
        list(engine.submit(request))
        again = list(engine.submit(request))  # now behind a shared path that ends inside a page
        engine.run_alone(engine.check_integrity)
    assert len(again) == 4 * 24 - 18
    assert again == alone(decoder, request)[: len(again)]


def test_a_prefix_that_is_there_is_not_computed_again(decoder: Decoder) -> None:
    rng = random.Random(3)
    preamble, a, b, c = (ids(rng, n) for n in (6, 9, 5, 7))
    first = with_chunks(preamble, [a, b], ids(rng, 3))
    second = with_chunks(preamble, [a, c], ids(rng, 4))
    third = with_chunks(preamble, [c, a], ids(rng, 4))
    with Engine(decoder, SMALL) as engine:
        counts = []
        for request in (first, first, second, third):
            ticket = engine.submit(request)
            assert list(ticket) == alone(decoder, request)
            assert ticket.record is not None
            counts.append(ticket.record.counts["exact"])
        assert counts == [0, 20, 15, 6]
        stats = engine.stats()
        assert (stats["tree_nodes"], stats["tokens_exact"]) == (6, sum(counts))
        assert stats["tree_device_bytes"] > stats["tree_host_bytes"] == 0
        full = engine.submit(replace(first, use_tree=False))
        assert list(full) == alone(decoder, first)
        assert full.record is not None
        assert full.record.counts["exact"] == 0


def test_tenants_share_no_prefix(decoder: Decoder) -> None:
    rng = random.Random(4)
    request = with_chunks(ids(rng, 6), [ids(rng, 9)], ids(rng, 3))
    with Engine(decoder, SMALL) as engine:
        for namespace, cached in (("a", 0), ("b", 0), ("a", 15)):
            ticket = engine.submit(replace(request, namespace=namespace))
            list(ticket)
            assert ticket.record is not None
            assert ticket.record.counts["exact"] == cached


def test_a_cancelled_request_leaves_its_whole_chunks_behind(decoder: Decoder) -> None:
    gated = GatedDecoder(decoder)
    rng = random.Random(5)
    preamble, a, b = ids(rng, 6), ids(rng, 9), ids(rng, 30)
    with Engine(gated, replace(SMALL, alone_rows=16)) as engine:
        guess = engine.submit(with_chunks(preamble, [a, b], ids(rng, 3)), held=True)
        gated.permits.release(1)  # 16 of 48 rows: the preamble and the first chunk
        while gated.steps < 1:
            pass
        guess.cancel()
        gated.permits.release(99)
        assert guess.wait(30)
        ticket = engine.submit(with_chunks(preamble, [a], ids(rng, 3)))
        list(ticket)
        assert ticket.record is not None
        assert ticket.record.counts["exact"] == 15
        stats = engine.stats()
        assert stats["speculation_wasted_tokens"] <= 2 * 16 - 15
        engine.run_alone(engine.check_integrity)


def test_a_held_request_gives_nothing_out_before_it_is_released(decoder: Decoder) -> None:
    gated = GatedDecoder(decoder)
    request = plain(ids(random.Random(6), 12), max_tokens=3)
    with Engine(gated, SMALL) as engine:
        guess = engine.submit(request, held=True)
        gated.permits.release(50)
        while gated.steps < 1:
            pass
        engine.run_alone(lambda: None)  # the step is over
        engine.run_alone(lambda: None)
        assert gated.steps == 1, "only the prompt is computed"
        assert not guess.is_done
        assert guess.timeline.first_token_s is None
        guess.release()
        assert list(guess) == alone(decoder, request)
        assert engine.stats()["speculation_saved_tokens"] == 12
    assert gated.steps == 3, "the first token came from what was computed before"


def test_one_request_that_fails_hurts_no_other(decoder: Decoder) -> None:
    rng = random.Random(7)
    broken = BreakingDecoder(decoder)
    good = [plain([i % 96 for i in ids(rng, 12)], max_tokens=6) for _ in range(5)]
    good = [
        r for r in good if BreakingDecoder.POISON not in [c.token_id for c in alone(decoder, r)]
    ]
    bad = plain([1, 2, BreakingDecoder.POISON, 3], max_tokens=6)
    with Engine(broken, SMALL) as engine:
        tickets = [engine.submit(request) for request in (*good[:2], bad, *good[2:])]
        with pytest.raises(RuntimeError, match="breaks everything"):
            list(tickets.pop(2))
        assert [list(t) for t in tickets] == [alone(decoder, request) for request in good]
        engine.run_alone(engine.check_integrity)
        assert engine.stats()["pages_used"] == 0
        assert engine.stats()["requests_failed"] == 1
        assert engine.stats()["steps_parted"] >= 1


def test_closing_ends_what_runs_and_refuses_what_comes(decoder: Decoder) -> None:
    gated = GatedDecoder(decoder)
    engine = Engine(gated, SMALL)
    tickets = [engine.submit(plain([1, 2, 3], max_tokens=400)) for _ in range(3)]
    tickets.append(engine.submit(plain([1, 2, 3]), held=True))
    gated.permits.release(5)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gated.permits.release(500)
    closing.join(30)
    assert not closing.is_alive()
    for ticket in tickets:
        with pytest.raises(EngineClosed, match="before the answer was finished"):
            list(ticket)
        ticket.cancel()  # harmless now
    with pytest.raises(EngineClosed, match="open another one"):
        engine.submit(plain([1]))
    engine.close()
    engine.check_integrity()
    assert engine.stats()["pages_used"] == 0


def test_an_engine_that_rests_has_no_thread_and_wakes_again(decoder: Decoder) -> None:
    with Engine(decoder, replace(SMALL, idle_s=0.01)) as engine:
        for _ in range(3):
            request = plain([1, 2, 3], max_tokens=2)
            assert list(engine.submit(request)) == alone(decoder, request)
            thread = engine.run_alone(threading.current_thread)
            thread.join(30)
            assert not thread.is_alive()


def test_jobs_run_between_steps_and_raise_what_they_raise(decoder: Decoder) -> None:
    with Engine(decoder, SMALL) as engine:
        ticket = engine.submit(plain([1, 2, 3], max_tokens=50))
        names = [engine.run_alone(lambda: threading.current_thread().name) for _ in range(3)]
        assert set(names) == {"engine"}
        assert engine.run_alone(lambda: engine.run_alone(lambda: 7)) == 7
        with pytest.raises(KeyError, match="lost"):
            engine.run_alone(lambda: {}["lost"])
        assert len(list(ticket)) == 50


def test_sixty_four_threads_get_their_own_answers(decoder: Decoder) -> None:
    rng = random.Random(8)
    chunks = [ids(rng, rng.randint(1, 12)) for _ in range(5)]
    requests = [make_request(random.Random(i), chunks) for i in range(64)]
    want = [[choice.token_id for choice in alone(decoder, request)] for request in requests]
    with Engine(decoder, SMALL) as engine, ThreadPoolExecutor(64) as pool:
        assert list(pool.map(lambda r: tokens(engine.submit(r)), requests)) == want
        engine.run_alone(engine.check_integrity)
        assert engine.stats()["requests_finished"] == 64


def test_what_cannot_be_computed_is_refused_at_once(decoder: Decoder) -> None:
    with Engine(decoder, TINY) as engine:
        with pytest.raises(RequestError, match="the KV pool holds 96"):
            engine.submit(plain([1] * 96))
        with pytest.raises(RequestError, match="the prompt is empty"):
            engine.submit(plain([]))
        with pytest.raises(RequestError, match="outside the vocabulary"):
            engine.submit(plain([97]))
    with pytest.raises(ConfigError, match="max_running must be at least 1"):
        EngineConfig(max_running=0)


def test_the_end_of_an_answer_is_a_known_token_or_no_room(decoder: Decoder) -> None:
    request = plain([5, 6, 7], max_tokens=20)
    want = alone(decoder, request)
    last = want[4].token_id
    ending = EngineRequest((5, 6, 7), Sampling(max_tokens=20), frozenset([last]))
    with Engine(decoder, SMALL) as engine:
        got = list(engine.submit(ending))
        assert got == alone(decoder, ending)
        assert got[-1].token_id == last
        assert len(got) <= 5


def test_a_deleted_chunk_is_no_longer_found(decoder: Decoder) -> None:
    rng = random.Random(9)
    preamble, a, b = ids(rng, 6), ids(rng, 9), ids(rng, 5)
    with Engine(decoder, SMALL) as engine:
        for front, gone, left in ((preamble, 2, 6), ((), 4, 0)):  # the second finds both paths
            request = with_chunks(front, [a, b], ids(rng, 3))
            list(engine.submit(request))
            assert engine.forget([request.chunks[0].id]) == gone
            ticket = engine.submit(request)
            assert list(ticket) == alone(decoder, request)
            assert ticket.record is not None
            assert ticket.record.counts["exact"] == left
        engine.run_alone(engine.check_integrity)


class NumberlessDecoder(Decoder):
    """Gives logits that are no numbers behind a certain token, as half precision may."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.spec, decoder.weights)

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        logits = super().forward(batch)
        end = 0
        for rows in batch:
            start, end = end, end + len(rows.wanted)
            if BreakingDecoder.POISON in rows.token_ids:
                logits[start:end] = float("nan")
        return logits


def test_a_token_that_cannot_be_drawn_fails_its_own_request_alone(decoder: Decoder) -> None:
    well = plain((1, 2, 3), max_tokens=6, temperature=0.9, seed=4)
    with Engine(NumberlessDecoder(decoder), SMALL) as engine:
        others = [engine.submit(well) for _ in range(3)]
        ill = engine.submit(plain((1, BreakingDecoder.POISON), temperature=0.9, seed=1))
        held = engine.submit(plain((1, BreakingDecoder.POISON), temperature=0.9), held=True)
        with pytest.raises(ModelError, match="no numbers"):
            tokens(ill)
        held.release()
        with pytest.raises(ModelError, match="no numbers"):
            tokens(held)
        for ticket in others:
            assert tokens(ticket) == [choice.token_id for choice in alone(decoder, well)]
        engine.run_alone(engine.check_integrity)
        assert engine.stats()["requests_failed"] == 2


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


def test_a_decoder_whose_passes_are_recorded_serves_one_engine(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(decoder, SMALL), Engine(decoder, SMALL):
        pass  # nothing is recorded on a CPU
    monkeypatch.setattr(Decoder, "can_record", True)
    with Engine(decoder, SMALL), pytest.raises(ConfigError, match="load another"):
        Engine(decoder, SMALL)
    Engine(decoder, SMALL).close()
