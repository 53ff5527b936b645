"""A loop is noticed within a bound, and nothing that people want to read is one."""

from itertools import cycle, islice
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.text.detokenizer import LEAST_REPEATS, LEAST_TOKENS, LONGEST_PERIOD, LoopWatch

IDS = st.integers(0, 2**17)


def loop_tokens(period: int) -> int:
    """Tokens that a run of this period has when it counts as a loop."""
    return max(LEAST_REPEATS * period, LEAST_TOKENS)


def stopped_after(ids: list[int]) -> int | None:
    """How many tokens had come when it was a loop; None: it never was."""
    watch = LoopWatch()
    return next((i for i, token_id in enumerate(ids, 1) if watch.push(token_id)), None)


@settings(deadline=None, max_examples=40)
@given(st.lists(IDS, max_size=300), st.lists(IDS, min_size=1, max_size=LONGEST_PERIOD))
def test_any_periodic_end_is_noticed_when_it_is_long_enough(
    front: list[int], words: list[int]
) -> None:
    bound = len(front) + loop_tokens(len(words))
    ids = [*front, *islice(cycle(words), loop_tokens(len(words)))]
    found = stopped_after(ids)
    assert found is not None
    assert found <= bound


@settings(deadline=None, max_examples=40)
@given(st.lists(IDS, min_size=1, max_size=LONGEST_PERIOD, unique=True))
def test_it_is_noticed_at_that_token_and_not_before(words: list[int]) -> None:
    ids = list(islice(cycle(words), 1000))
    assert stopped_after(ids) == loop_tokens(len(words))


@pytest.mark.parametrize("vocabulary", [4, 16, 300, 50_000])
def test_random_tokens_are_no_loop(vocabulary: int) -> None:
    for seed in range(5):
        draw = Random(seed)
        assert stopped_after([draw.randrange(vocabulary) for _ in range(2000)]) is None


@settings(deadline=None, max_examples=40)
@given(st.lists(IDS, max_size=60), st.integers(5, 60))
def test_one_token_that_changes_each_time_is_enough(words: list[int], times: int) -> None:
    """Counting, numbered lists, tables with another number in each row."""
    ids = [token for i in range(times) for token in (2**18 + i, *words)]
    assert stopped_after(ids) is None


def test_what_repeats_after_more_than_the_longest_period_is_let_through() -> None:
    assert stopped_after(list(islice(cycle(range(LONGEST_PERIOD + 1)), 2000))) is None


def test_a_rule_of_dashes_and_a_row_of_zeros_are_let_through() -> None:
    assert stopped_after([7] * (LEAST_TOKENS - 1)) is None
    assert stopped_after([7, 8] * (LEAST_TOKENS // 2 - 1)) is None


@pytest.mark.parametrize("period", [1, 3, 24, 25, LONGEST_PERIOD])
def test_a_break_begins_anew(period: int) -> None:
    most = loop_tokens(period) - 1
    almost = list(islice(cycle(range(period)), most))
    assert stopped_after([*almost, 99, *almost, 98, *almost]) is None
