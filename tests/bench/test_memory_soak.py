"""What bench/soak/memory.py calls a leak: not what swings, not what warms up, but what stays."""

import math
import os
import random

import pytest

from soak.memory import LEAK_KB, Samples

NUM_OPENINGS = 9000  # of an hour


def samples_of(leak_kb: float, warm_up_mb: float = 60.0, num: int = NUM_OPENINGS) -> Samples:
    """A run that warms up within a sixth of it, swings with what is open, and may leak."""
    rng, samples = random.Random(0), Samples(os.getpid())
    for second in range(3600):
        openings = num * second / 3600
        warm_mb = warm_up_mb * (1 - math.exp(-6 * openings / num))
        swing_mb = rng.choice([0, 0, 1, 2]) * 15 * rng.random()
        rss_mb = 400 + warm_mb + swing_mb + leak_kb * openings / 1000
        samples.taken.append({"openings": openings, "rss_mb": rss_mb, "threads": 24, "handles": 25})
    return samples


def test_a_server_that_warms_up_and_swings_does_not_leak() -> None:
    assert samples_of(0.0).wrong() == []


@pytest.mark.parametrize("leak_kb", [2 * LEAK_KB, 300.0])
def test_a_little_that_every_opening_leaves_is_told(leak_kb: float) -> None:
    (said,) = samples_of(leak_kb).wrong()
    assert said.startswith("every opening of a knowledge base leaves")
    found = samples_of(leak_kb).kb_per_opening()
    assert found == pytest.approx(leak_kb, abs=0.5 * LEAK_KB)


def test_a_run_of_a_few_openings_says_nothing_of_leaks() -> None:
    samples = samples_of(300.0, num=900)
    assert samples.kb_per_opening() is None
    assert samples.wrong() == []


def test_threads_that_stay_are_told() -> None:
    samples = samples_of(0.0)
    for number, sample in enumerate(samples.taken):
        sample["threads"] += number // 200
    (said,) = samples.wrong()
    assert said.startswith("threads grew")
