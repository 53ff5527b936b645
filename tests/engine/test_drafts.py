"""Drafts are what followed before, as long as they pay, and change no answer."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvweave.engine.config import EngineConfig
from kvweave.engine.drafts import (
    LONGEST_MATCH,
    AnswerDrafts,
    DraftOdds,
    Drafts,
    DraftSource,
    StepTimes,
)
from kvweave.engine.engine import Engine
from kvweave.engine.progress import Progress
from kvweave.engine.request import EngineRequest
from kvweave.engine.sampling import Sampling, TokenConstraint
from kvweave.errors import ConfigError
from kvweave.model.decoder import Decoder
from worlds.engine import SMALL, alone, ids, plain, tokens, with_chunks

COPYING, PLAIN = replace(SMALL, copy_tokens=15), SMALL
LONG = {"max_tokens": 60}
# an answer of three different tokens repeats itself: there is much to copy
FEW_WORDS = {"logit_bias": ((3, 60.0), (7, 60.0), (9, 60.0))}


# ---- what is found


def longest_match(known: Sequence[int]) -> tuple[int, int] | None:
    """Length of the longest match, and where the latest such match ends; by looking everywhere."""
    best = None
    for end in range(1, len(known)):
        length = 0
        while (
            length < min(end, LONGEST_MATCH)
            and known[end - 1 - length] == known[len(known) - 1 - length]
        ):
            length += 1
        if length and (best is None or length >= best[0]):
            best = length, end
    return best


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 9))
def test_a_draft_is_what_followed_the_latest_of_the_longest_matches(
    known: list[int], most: int
) -> None:
    found, wanted = DraftSource(known, 10).find(most), longest_match(known)
    if wanted is None:
        assert found is None
        return
    length, end = wanted
    assert found is not None
    assert found.match == length
    assert list(found.token_ids) == known[end : end + most]


def test_a_source_grows_with_the_answer() -> None:
    source = DraftSource([1, 2, 3, 4], 5)
    assert source.find(3) is None
    source.grow([1, 2, 3, 4, 2])
    found = source.find(3)
    assert found is not None
    assert list(found.token_ids) == [3, 4, 2]
    source.grow([1, 2, 3, 4, 2, 3])
    found = source.find(1)
    assert found == ([4], 2)


# ---- how long a draft is


def made(drafts: Drafts, known: Sequence[int], room: int = 99) -> AnswerDrafts:
    return together(drafts, [known], room)[0]


def together(drafts: Drafts, prompts: Sequence[Sequence[int]], room: int) -> list[AnswerDrafts]:
    """Answers that decode together, behind these prompts."""
    answers = [drafts.open(known, room) for known in prompts]
    for answer, known in zip(answers, prompts, strict=True):
        answer.prepare(known, 0, room)
    drafts.share_out(answers, len(answers))
    return answers


def prepare_again(drafts: Drafts, answer: AnswerDrafts, known: Sequence[int]) -> int:
    answer.prepare(known, 0, 99)
    drafts.share_out([answer], 1)
    return len(answer.token_ids)


def test_a_draft_is_as_long_as_may_be_where_rows_cost_nothing() -> None:
    drafts = Drafts(4)
    for rows in (1, 5, 1, 5):
        drafts.observe_step(rows, 0.01)
    assert list(made(drafts, [1, 2, 3, 4, 5, 6, 1]).token_ids) == [2, 3, 4, 5]


def test_nothing_is_drafted_where_each_row_costs_a_step() -> None:
    drafts = Drafts(4)
    for rows in (1, 2, 3, 5, 1, 5):
        drafts.observe_step(rows, 0.01 * rows)
    assert list(made(drafts, [1, 2, 3, 4, 5, 6, 1]).token_ids) == []


def test_nothing_is_drafted_that_is_never_looked_at() -> None:
    drafts = Drafts(4)
    assert list(made(drafts, [1, 2, 3, 4, 1], room=3).token_ids) == [2, 3]
    assert list(made(drafts, [1, 2, 3, 4, 1], room=1).token_ids) == []


def test_answers_share_the_rows_that_cost_nothing() -> None:
    """Blocks of 16 rows: eight answers have a row each that is free, not seven each."""
    drafts, prompts = Drafts(15), [[n, *range(20, 40), n] for n in range(8)]
    for rows in (8, 14, 16, 20, 24, 30, 40, 60, 90, 120):
        drafts.observe_step(rows, 0.1 * -(-rows // 16))
    assert sum(len(each.token_ids) for each in together(drafts, prompts, 99)) == 8


def test_drafts_that_are_likelier_to_be_right_go_first() -> None:
    drafts, short, long = Drafts(15), [1, 2, 3, 1], [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    for rows in range(2, 40):
        drafts.observe_step(rows, 0.1 if rows <= 4 else 0.05 * rows)
    for _ in range(20):
        drafts.odds.observe(1, 0, 1)
        drafts.odds.observe(4, 3, 3)
    drafted = together(drafts, [short, long], 99)
    assert [list(each.token_ids) for each in drafted] == [[], [5, 6]]


def test_those_that_draft_nothing_count_as_decoding() -> None:
    """A row that is right is half a token more beside one other answer, and as dear."""
    drafts, known = Drafts(1), [1, 2, 3, 1]
    for rows in (1, 2, 9, 10):
        drafts.observe_step(rows, 0.01 + 0.003 * rows)
    answer = made(drafts, known)
    assert answer.token_ids
    answer.prepare(known, 0, 99)
    drafts.share_out([answer], 9)
    assert not answer.token_ids


def test_drafts_end_where_they_are_wrong_and_begin_again_after_a_while() -> None:
    drafts, known = Drafts(4), [1, 2, 3, 4, 5, 1]
    for rows in (1, 5, 1, 5):
        drafts.observe_step(rows, 0.01 * (1 + rows / 10))
    answer = made(drafts, known)
    wrong = 0
    while prepare_again(drafts, answer, known):
        answer.judge(0, len(answer.token_ids))
        wrong += 1
        assert wrong < 99, "it goes on for ever"
    assert wrong > 0
    assert len(made(drafts, known).token_ids) <= 1 < 4, "other answers know"
    waited = 0
    while not prepare_again(drafts, answer, known):
        waited += 1
        assert waited < 1000, "it never tries again"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-6, 10.0)), max_size=30))
def test_more_rows_never_count_as_cheaper(steps: list[tuple[int, float]]) -> None:
    times = StepTimes()
    for rows, seconds in steps:
        times.observe(rows, seconds)
    costs = times.expect(np.arange(1, 700)).tolist()
    assert costs == sorted(costs)
    assert costs[0] > 0
    assert all(np.isfinite(costs))


def test_what_steps_take_is_learnt_as_it_is() -> None:
    times = StepTimes()
    for rows, seconds in 9 * ((8, 0.1), (16, 0.1), (17, 0.3), (24, 0.3)):
        times.observe(rows, seconds)
    costs = 10 * times.expect(np.array([8, 12, 16, 17, 20, 24, 32]))
    assert costs[:6] == pytest.approx([1.0, 1.0, 1.0, 3.0, 3.0, 3.0], rel=0.1)
    assert 3.2 < costs[6] < 4.0, "what was not seen costs more"


def test_many_answers_draft_nothing_before_steps_of_them_are_known() -> None:
    """A row beside 32 others is dear where it is not known to be cheap."""
    drafted = together(Drafts(15), [[n, *range(50, 60), n] for n in range(32)], 99)
    assert not any(each.token_ids for each in drafted)


def test_a_step_that_was_slow_by_chance_is_forgotten() -> None:
    times, rows = StepTimes(), np.array([1, 2, 4])
    for seen, seconds in ((1, 0.1), (4, 0.11), (2, 1.0)):
        times.observe(seen, seconds)
    assert times.expect(rows)[1] == pytest.approx(0.11, rel=0.02), "more rows took less"
    times.observe(8, 9.0)
    assert times.expect(np.array([8]))[0] < 0.3, "something else came between"
    for _ in range(20):
        times.observe(8, 9.0)
    assert times.expect(np.array([8]))[0] > 3.0, "again and again: no chance"
    for _ in range(400):
        times.observe(1, 0.1)
    assert times.expect(np.array([8]))[0] < 0.2


def test_odds_begin_with_what_others_saw() -> None:
    known, new = DraftOdds(), DraftOdds()
    for _ in range(50):
        known.observe(3, 4, 4)
    assert known.odds(3) > 0.9
    assert new.odds(3, known) == pytest.approx(known.odds(3))
    for _ in range(5):
        new.observe(3, 0, 1)
    assert new.odds(3, known) < 0.6 < known.odds(3)


# ---- answers


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "seed": 6},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.6, "frequency_penalty": 0.4},
        FEW_WORDS,
        {**FEW_WORDS, "temperature": 0.8, "seed": 7, "logprobs": 2},
        {"logprobs": 3},
    ],
)
def test_a_copied_answer_is_the_plain_one(decoder: Decoder, how: dict[str, object]) -> None:
    rng = random.Random(repr(how))
    for _ in range(4):
        request = plain(ids(rng, 30), **LONG, **how)
        with Engine(decoder, COPYING) as engine:
            assert list(engine.submit(request)) == alone(decoder, request)


def test_copying_takes_fewer_steps(decoder: Decoder) -> None:
    request, counts = plain(ids(random.Random(3), 30), max_tokens=120, **FEW_WORDS), {}
    for cfg in (COPYING, PLAIN):
        with Engine(decoder, cfg) as engine:
            answer = engine.submit(request)
            list(answer)
            counts[cfg.copy_tokens] = stats = engine.stats()
            assert answer.timeline.drafted == stats["tokens_drafted"]
            assert answer.timeline.copied == stats["tokens_copied"]
            assert stats["tokens_answered"] == 120
    assert counts[0]["tokens_drafted"] == 0
    assert counts[15]["tokens_copied"] > 40
    assert counts[15]["tokens_drafted"] >= counts[15]["tokens_copied"]


class EvenThenOdd:
    """Even tokens may follow odd ones, and odd ones even ones."""

    def __init__(self) -> None:
        self._parity = 0

    def take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            assert token_id % 2 == self._parity, "it was told of a token that may not come"
            self._parity = 1 - self._parity

    def mask(self) -> NDArray[np.bool_]:
        return np.arange(97) % 2 == self._parity


def test_a_grammar_holds_for_copied_tokens(decoder: Decoder) -> None:
    rng, got = random.Random(4), []
    prompt = ids(rng, 30)
    for cfg in (COPYING, PLAIN):
        constraint: TokenConstraint = EvenThenOdd()
        few = tuple((token, 60.0) for token in (3, 4, 7, 8))
        sampling = Sampling(max_tokens=60, json_schema=json.dumps({}), logit_bias=few)
        request = EngineRequest(
            prompt, sampling, frozenset(), constraint=lambda constraint=constraint: constraint
        )
        with Engine(decoder, cfg) as engine:
            got.append(tokens(engine.submit(request)))
            assert bool(engine.stats()["tokens_copied"]) == bool(cfg.copy_tokens)
    assert got[0] == got[1]
    assert [token % 2 for token in got[0]] == [0, 1] * 30


def test_the_end_of_an_answer_may_be_copied(decoder: Decoder) -> None:
    request = plain(ids(random.Random(5), 30), max_tokens=60)
    wanted = [choice.token_id for choice in alone(decoder, request)]
    for last in dict.fromkeys(wanted):
        ending = replace(request, eos_ids=frozenset([last]))
        with Engine(decoder, COPYING) as engine:
            assert tokens(engine.submit(ending)) == wanted[: wanted.index(last) + 1]


def test_forced_answers_are_computed_many_tokens_a_step(decoder: Decoder) -> None:
    """An audit computes what was answered: all of it is known."""
    rng, told = random.Random(6), {}
    forced = ids(rng, 33)
    request = replace(plain(ids(rng, 20)), forced=forced, watched=33, background=True)
    for cfg in (replace(COPYING, background_rows=32), PLAIN):
        with Engine(decoder, cfg) as engine:
            ticket = engine.submit(request)
            assert tuple(tokens(ticket)) == forced
            told[cfg.copy_tokens] = ticket.distributions
            assert ticket.timeline.copied == (30 if cfg.copy_tokens else 0)
            assert engine.stats()["tokens_copied"] == 0, "nobody was answered"
    for one, other in zip(told[15], told[0], strict=True):
        assert one.allclose(other, atol=1e-6)


def test_many_copied_answers_are_those_of_each_alone(decoder: Decoder) -> None:
    """Beside each other, over shared prefixes, with pages that run out."""
    rng = random.Random(7)
    chunks = [ids(rng, 12) for _ in range(3)]
    requests = [
        with_chunks(chunks[0], rng.sample(chunks, 2), ids(rng, 4), max_tokens=50) for _ in range(6)
    ]
    with Engine(decoder, replace(COPYING, pool_tokens=4 * 48)) as engine:
        tickets = [engine.submit(request) for request in requests]
        got = [list(ticket) for ticket in tickets]
        stats = engine.stats()
        assert stats["preemptions"] > 0
        assert stats["tokens_copied"] > 0
        engine.run_alone(engine.check_integrity)
    assert got == [alone(decoder, request) for request in requests]


# ---- rows of a step


def test_rows_of_a_draft_do_not_count_before_they_are_right() -> None:
    progress = Progress(1, known=10, computed=9)
    progress.advance(5)
    assert (progress.computed, progress.needed) == (10, 0)


def test_copying_is_set_by_its_number_of_tokens() -> None:
    assert EngineConfig().copy_tokens is None
    with pytest.raises(ConfigError, match="copy_tokens must be at least 0"):
        EngineConfig(copy_tokens=-1)
