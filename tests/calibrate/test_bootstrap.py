"""Intervals of means over questions."""

import numpy as np
import pytest

from kvweave.calibrate.bootstrap import Bootstrap


def test_an_interval_holds_the_mean_and_narrows_with_questions() -> None:
    rng = np.random.default_rng(3)
    few, many = (Bootstrap(n).mean(rng.exponential(1.0, n)) for n in (20, 500))
    assert few.low < few.mean < few.high
    assert many.high - many.low < (few.high - few.low) / 2
    flat = Bootstrap(5).mean(np.full(5, 0.25))
    assert flat == pytest.approx((0.25, 0.25, 0.25))


def test_recovery_is_a_ratio_of_means() -> None:
    boot = Bootstrap(2)
    found = boot.recovered_share(np.array([1.0, 0.0]), np.array([1.0, 3.0]))
    assert found is not None
    assert found.mean == 0.75
    assert boot.recovered_share(np.zeros(2), np.zeros(2)) is None
