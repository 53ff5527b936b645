"""The load generator of bench/throughput/run.py: waits for no answer, finds the highest rate."""

import threading
import time
from argparse import Namespace
from collections.abc import Iterator

import pytest

from throughput.open_loop import arrivals, highest_rate, percentile, probe
from throughput.run import MODES, warm_requests


def test_twice_the_rate_is_the_same_pattern_twice_as_fast() -> None:
    slow, fast = arrivals(2.0, 50.0, seed=3), arrivals(4.0, 25.0, seed=3)
    assert fast == pytest.approx([at / 2 for at in slow])
    assert len(slow) == 100, "as many as the rate says"
    assert slow == sorted(slow)
    assert slow[0] > 0
    assert slow[-1] < 50
    assert arrivals(0.1, 2.0, seed=3)[0] < 2.0, "one, at least"


def test_percentiles_lie_between_the_values() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([7.0], 95) == 7.0
    assert percentile([], 95) is None


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.3])
def test_the_search_ends_just_below_the_limit(limit: float) -> None:
    tried: list[float] = []

    def keeps(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = highest_rate(keeps, 1.0, most_probes=12)
    assert limit / 1.1 < found <= limit
    assert found in tried


def test_a_rate_that_nothing_keeps_is_none() -> None:
    assert highest_rate(lambda _: False, 1.0, most_probes=3) == 0.0


def test_requests_come_when_they_are_due_and_a_slow_server_is_seen_to_be_late() -> None:
    turn = threading.Lock()

    def serve(number: int) -> Iterator[int]:
        with turn:  # one at a time: a server that cannot keep up
            time.sleep(0.05)
            yield number
            yield number

    slow = probe(serve, 200.0, 0.2, 0.1, range(1000), seed=0)
    assert not slow.within
    quick = probe(lambda number: iter([number]), 200.0, 0.2, 60.0, range(1000), seed=0)
    assert quick.within
    assert [one.tokens for one in quick.served] == [[n] for n in range(len(quick.served))]


def test_an_error_of_a_request_is_reported_and_loses_the_rate() -> None:
    def serve(number: int) -> Iterator[int]:
        yield number
        if number == 1:
            raise ValueError("no")

    seen = probe(serve, 100.0, 0.1, 60.0, range(100), seed=0)
    assert not seen.within
    assert seen.numbers()["errors"] == ["ValueError: no"]


def test_every_way_is_warmed_alike_where_steps_are_recorded() -> None:
    counts = {mode: warm_requests(mode, Namespace(device="cuda", warm=24)) for mode in MODES}
    assert set(counts.values()) == {24}
    assert warm_requests("full", Namespace(device="cpu", warm=24)) == 2
