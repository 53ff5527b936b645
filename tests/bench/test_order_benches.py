"""The benches of orders and of skew: what they count."""

import numpy as np
import pytest

from common.streams import Ask
from kvweave.kv.tree import ChunkRef
from kvweave.types import ChunkId
from order_ttft import over_given
from ordering import Foreseen, Frequency, Ordering, Planned, avoided, decompose, most_tokens, swept
from quality.orders import GIVEN, summary
from skew import skew

UNBOUNDED = 64.0


def make_asks(*words: str) -> list[Ask]:
    """One chunk of a hundred tokens for each letter."""
    return [Ask(tuple(ChunkRef(ChunkId(c), 100) for c in word), 20) for word in words]


def test_most_is_what_the_best_earlier_request_has_in_common() -> None:
    asks = make_asks("abc", "cba", "adx", "bce")
    assert most_tokens(asks) == pytest.approx((3 + 1 + 2) / 12)


@pytest.mark.parametrize("kind", [Ordering, Frequency, Planned])
def test_no_order_avoids_more_than_most(kind: type[Ordering]) -> None:
    asks = make_asks(*["abc", "cba", "bda", "acd", "dcb", "cab"] * 3)
    assert avoided(asks, kind(UNBOUNDED)) <= most_tokens(asks)


def test_a_free_order_finds_what_the_given_one_does_not() -> None:
    asks = make_asks("abc", "cba", "bca")
    assert avoided(asks, Ordering(UNBOUNDED)) == 0
    assert avoided(asks, Planned(UNBOUNDED)) == pytest.approx(6 / 9)
    assert avoided(asks, Foreseen(UNBOUNDED, asks=asks)) == pytest.approx(6 / 9)


def test_a_threshold_keeps_the_first_use_out_of_the_tree() -> None:
    asks = make_asks("ab", "ab", "ab")
    assert avoided(asks, Planned(UNBOUNDED, uses=1)) == pytest.approx(4 / 6)
    assert avoided(asks, Planned(UNBOUNDED, uses=2)) == pytest.approx(2 / 6)


def test_what_is_lost_adds_up() -> None:
    asks = make_asks(*["abc", "cba", "bda", "acd"] * 3)
    parts = decompose(asks, UNBOUNDED)
    assert parts["most"] == pytest.approx(most_tokens(asks), abs=1e-4)
    assert parts["aligned"] == pytest.approx(avoided(asks, Ordering(UNBOUNDED)), abs=1e-4)
    assert parts["ordered"] == pytest.approx(avoided(asks, Planned(UNBOUNDED)), abs=1e-4)
    assert parts["aligned"] < parts["ordered"] < parts["most"]


class Sweep:
    windows = (1, 1000)
    uses = (1, 2)


def test_sweeps_have_a_figure_for_every_setting() -> None:
    asks = make_asks("abc", "cba", "abd", "cba")
    one = swept(asks, [UNBOUNDED], Sweep())[f"{UNBOUNDED:g}"]  # type: ignore[arg-type]
    assert set(one) == {"window", "uses", "tail"}
    assert list(one["window"]["planner"]) == [1, 1000]
    for uses, share in one["uses"]["planner"].items():
        assert share == pytest.approx(avoided(asks, Planned(UNBOUNDED, uses=uses)), abs=1e-4)
    assert one["uses"]["planner"][1] != one["uses"]["planner"][2]


def test_an_interval_of_differences_holds_their_mean() -> None:
    def line(number: int, given: float, *others: float) -> dict[str, object]:
        scores = {GIVEN: given, **{f"drawn {n}": other for n, other in enumerate(others)}}
        ways = {w: {"text": str(s), "f1": s, "rouge_l": s} for w, s in scores.items()}
        return {"part": "order", "number": number, "ways": ways}

    found = summary([line(0, 1.0, 0.5, 1.0), line(1, 0.0, 0.0, 0.0)])["order"]
    assert (found["questions"], found["ways"], found["same_answer"]) == (2, 2, 0.75)
    low, high = found["f1"]["interval"]
    assert found["f1"]["difference"] == pytest.approx(-0.125)
    assert low <= -0.125 <= high <= 0


def test_skew_is_one_where_all_ask_for_the_same_and_even_where_none_do() -> None:
    assert skew(np.zeros((10, 1), np.int64), 100, 0.03) == 1.0
    assert skew(np.arange(100)[:, None], 100, 0.03) == pytest.approx(0.03)


def test_a_free_order_is_compared_with_the_same_strategy_as_found() -> None:
    cells = [
        {"way": way, "k": 5, "at_once": 1, "mean_ms": ms}
        for way, ms in (("full", 90.0), ("prefix", 60.0), ("prefix, free", 45.0))
    ]
    (row,) = over_given(cells)
    assert (row["way"], row["free_over_given"], row["free_over_full"]) == ("prefix", 1.3333, 2.0)
