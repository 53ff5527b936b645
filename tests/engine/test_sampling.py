"""From logits to a token: each setting does what its definition says, and bad ones are refused."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvweave.engine.sampling import MAX_TOP_LOGPROBS, Choice, Sampler, Sampling
from kvweave.errors import RequestError

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40).map(torch.tensor)
TEMPERATURES = st.floats(0.0, 100.0, exclude_min=True, allow_subnormal=True)


def choose(logits: Tensor, seen_ids: list[int] | None = None, **how: Any) -> Choice:
    return Sampler(Sampling(**how)).choose(logits, seen_ids or [])


def drawn(logits: Tensor, times: int = 400, **how: Any) -> Counter[int]:
    sampler = Sampler(Sampling(temperature=1.0, seed=0, **how))
    return Counter(sampler.choose(logits, []).token_id for _ in range(times))


@settings(deadline=None)
@given(LOGITS)
def test_temperature_zero_takes_the_likeliest(logits: Tensor) -> None:
    assert choose(logits, temperature=0.0).token_id == int(logits.argmax())


@settings(deadline=None)
@given(LOGITS, TEMPERATURES, st.floats(0.0, 1.0, exclude_min=True), st.integers(0, 50))
def test_any_accepted_setting_draws_a_token_it_keeps(
    logits: Tensor, temperature: float, top_p: float, top_k: int
) -> None:
    choice = choose(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    kept = sorted(logits.tolist(), reverse=True)[: top_k or None]
    assert logits[choice.token_id] >= kept[-1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-40, 1e-30, 1e-6])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.tensor([1.0, 3.0, 2.999, -5.0])
    assert choose(logits, temperature=temperature).token_id == 1


def test_a_draw_follows_the_softmax_at_its_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    sampler = Sampler(Sampling(temperature=2.0, seed=3))
    counts = Counter(sampler.choose(logits, []).token_id for _ in range(4000))
    for token_id, share in enumerate((logits / 2.0).softmax(-1).tolist()):
        assert counts[token_id] / 4000 == pytest.approx(share, abs=0.03)


def test_top_k_keeps_exactly_the_k_likeliest() -> None:
    logits = torch.tensor([0.1, 0.5, 0.4, 0.3, 0.2])
    assert set(drawn(logits, top_k=2)) == {1, 2}
    assert set(drawn(logits, top_k=99)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_with_that_probability() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert set(drawn(logits, top_p=0.5)) == {1}
    assert set(drawn(logits, top_p=0.51)) == {1, 2}
    assert set(drawn(logits, top_p=0.76)) == {1, 2, 3}
    assert set(drawn(logits, top_p=1e-320)) == {1}


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()  # behind top_k=2: 0.57 and 0.43
    assert set(drawn(logits, top_k=2, top_p=0.5)) == {0}
    assert set(drawn(logits, top_k=3, top_p=0.5)) == {0, 1}


def test_min_p_keeps_tokens_by_their_part_of_the_likeliest_ones_probability() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(drawn(logits, min_p=0.61)) == {0}
    assert set(drawn(logits, min_p=0.29)) == {0, 1, 2}
    assert set(drawn(logits, min_p=1.0)) == {0}
    hot = Sampler(Sampling(temperature=50.0, seed=0, min_p=0.29))  # after the temperature
    assert {hot.choose(logits, []).token_id for _ in range(400)} == {0, 1, 2, 3}


def test_a_bias_is_added_to_the_logits_of_its_tokens() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    before = logits.clone()
    assert choose(logits, logit_bias=((2, 1.5),)).token_id == 2
    assert choose(logits, logit_bias=((2, 0.5),)).token_id == 1
    assert set(drawn(logits, logit_bias=((0, -100.0), (1, -100.0)))) == {2}
    biased = choose(logits, logit_bias=((2, 1.5),), logprobs=0)
    assert biased.logprob == pytest.approx(float(logits.log_softmax(-1)[2])), "the model's own"
    assert torch.equal(logits, before)
    assert not Sampling(logit_bias=((2, 1.5),)).is_plainly_greedy


@given(st.integers(0, 2**63 - 1))
@settings(deadline=None, max_examples=20)
def test_a_seed_repeats_the_whole_sequence(seed: int) -> None:
    logits = torch.zeros(1000)

    def sequence(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.choose(logits, []).token_id for _ in range(8)]

    assert sequence(seed) == sequence(seed)
    assert sequence(seed) != sequence((seed + 1) % 2**63)


def test_a_seed_is_not_disturbed_by_others() -> None:
    logits = torch.zeros(1000)
    alone, beside = (
        Sampler(Sampling(temperature=1.0, seed=5)),
        Sampler(Sampling(temperature=1.0, seed=5)),
    )
    first = [alone.choose(logits, []).token_id for _ in range(8)]
    second = []
    for _ in range(8):
        torch.rand(3)
        choose(logits, temperature=1.0, seed=9)
        second.append(beside.choose(logits, []).token_id)
    assert first == second


def test_without_a_seed_answers_differ() -> None:
    assert len({choose(torch.zeros(10**6), temperature=1.0).token_id for _ in range(4)}) > 1


@settings(deadline=None)
@given(LOGITS, st.floats(-2.0, 2.0), st.floats(-2.0, 2.0), st.data())
def test_presence_and_frequency_count_what_the_answer_has(
    logits: Tensor, presence: float, frequency: float, data: st.DataObject
) -> None:
    some_ids = st.lists(st.integers(0, len(logits) - 1), max_size=8)
    prompt, answer = data.draw(some_ids), data.draw(some_ids)
    sampler = Sampler(Sampling(presence_penalty=presence, frequency_penalty=frequency, logprobs=0))
    before, seen = logits.clone(), list(prompt)
    assert sampler.choose(logits, seen).token_id == int(logits.argmax())  # of the prompt: nothing
    for token_id in answer:
        seen.append(token_id)
        got = sampler.choose(logits, seen)
    if answer:
        expected = logits.double()
        for token_id, times in Counter(answer).items():
            expected[token_id] -= presence + frequency * times
        assert float(expected[got.token_id]) == pytest.approx(float(expected.max()), abs=1e-4)
        assert got.logprob == pytest.approx(float(logits.log_softmax(-1)[got.token_id]), abs=1e-5)
    assert torch.equal(logits, before)  # they belong to the caller


def test_a_penalised_answer_is_not_plainly_greedy() -> None:
    assert Sampling().is_plainly_greedy
    for name in ("presence_penalty", "frequency_penalty"):
        assert not Sampling(**{name: 0.5}).is_plainly_greedy
        assert not Sampling(**{name: -0.5}).is_plainly_greedy


@settings(deadline=None)
@given(LOGITS, st.floats(0.01, 100.0), st.data())
def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits(
    logits: Tensor, penalty: float, data: st.DataObject
) -> None:
    seen = data.draw(st.lists(st.integers(0, len(logits) - 1)))
    expected = logits.clone()
    for i in set(seen):  # once each, however often it was seen
        expected[i] = expected[i] / penalty if expected[i] > 0 else expected[i] * penalty
    before = logits.clone()
    got = choose(logits, seen, repetition_penalty=penalty, logprobs=0)
    assert expected[got.token_id] == pytest.approx(float(expected.max()), rel=1e-5, abs=1e-30)
    assert torch.equal(logits, before)  # they belong to the caller
    assert got.logprob == pytest.approx(float(logits.log_softmax(-1)[got.token_id]), abs=1e-5)


def test_log_probabilities_are_the_models_and_sum_to_one() -> None:
    logits = torch.linspace(-2.0, 3.0, MAX_TOP_LOGPROBS)
    choice = choose(
        logits, [19], temperature=0.7, top_k=3, repetition_penalty=2.0, logprobs=MAX_TOP_LOGPROBS
    )
    ids, logprobs = zip(*choice.alternatives, strict=True)
    assert list(ids) == list(range(MAX_TOP_LOGPROBS - 1, -1, -1))  # likeliest first
    assert sum(map(math.exp, logprobs)) == pytest.approx(1.0, abs=1e-5)
    assert dict(choice.alternatives)[choice.token_id] == choice.logprob


def test_log_probabilities_of_a_small_vocabulary_are_all_of_it() -> None:
    assert len(choose(torch.zeros(3), logprobs=20).alternatives) == 3


def test_nothing_is_reported_unless_asked_for() -> None:
    assert choose(torch.zeros(3)) == Choice(0, None, ())
    assert choose(torch.zeros(4), logprobs=0) == Choice(0, pytest.approx(-math.log(4)), ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", 101.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", 101.0),
        ("presence_penalty", 2.1),
        ("presence_penalty", "1"),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ("a", "")),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} must be .*, got ") as seen:
        Sampling(**{name: value})
    assert "\n" not in str(seen.value)
