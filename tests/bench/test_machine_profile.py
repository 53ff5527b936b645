"""How the machine profile of the benches is measured."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from machine_profile import measure_grid


def test_measuring_goes_round_and_takes_medians_after_a_warm_up() -> None:
    rounds = [[9.0, 99.0], [1.0, 10.0], [50.0, 60.0], [2.0, 20.0], [1.5, 15.0], [1.0, 10.0]]
    durations = iter([seconds for each in rounds for seconds in each])
    now = 0.0

    def run(x: int, y: int) -> None:
        nonlocal now
        now += next(durations)

    assert measure_grid(run, (0,), (8, 16), now_s=lambda: now).seconds == [[1.5, 15.0]]
