"""Faults of a device in short, on a CPU: what needs none of a GPU's own.

The whole of it is `python bench/fault_matrix.py --parts device --device cuda`.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reliability.device_faults import (
    COPIES,
    ENGINE,
    EXACT,
    SHARED,
    DeviceFault,
    plan_of,
)
from reliability.device_world import ANSWER, Answer, distance
from reliability.fault_rules import CORRUPTED, ERROR, EVICT, LOAD_MIDDLE, LOOKUP, OPS

SHORT = """
import json, sys, tempfile
from pathlib import Path
from reliability.device_faults import run_device_faults
wanted = {tuple(each) for each in json.loads(sys.argv[1])}
with tempfile.TemporaryDirectory() as folder:
    found = run_device_faults(Path(folder), "cpu", 1, lambda fault: tuple(fault[:3]) in wanted)
print(json.dumps(found))
"""
FEW = [
    (SHARED, LOOKUP, ERROR),
    (SHARED, LOOKUP, CORRUPTED),
    (SHARED, LOAD_MIDDLE, CORRUPTED),
    (COPIES, LOAD_MIDDLE, ERROR),
    (EXACT, EVICT, ERROR),
    (ENGINE, "hand out", ERROR),
    (ENGINE, "forward", "out of device memory"),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_few_faults_leave_right_answers_and_books_that_balance() -> None:
    """In a process of its own: hooks stay once they are there."""
    bench = Path(importlib.import_module("fault_matrix").__file__ or "").parent
    src = bench.parent / "src"
    env = {**os.environ, "PYTHONPATH": f"{src}{os.pathsep}{bench}"}
    command = [sys.executable, "-c", SHORT, json.dumps(FEW)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == []
    assert [row for row in found["rows"] if row["problems"]] == []
    struck = {(row["tier"].partition(", ")[2], row["op"], row["kind"]) for row in found["rows"]}
    assert struck == set(FEW)
    for control in found["control"]:  # a judge that sees nothing would let anything pass
        assert control["one_layer_of_values_zeroed"] > 10 * control["tolerance"]


def test_a_gpu_has_all_that_a_cpu_has_and_what_is_done_to_it() -> None:
    for shares in (True, False):
        here, there = (plan_of(shares=shares, on_gpu=each) for each in (False, True))
        assert set(here) < set(there)
        assert len(there) == len(set(there))
        more = {fault.kind for fault in set(there) - set(here)}
        assert more == {"out of device memory", "hang"}
        assert {fault.op for fault in there} >= set(OPS) - {LOOKUP}
    assert DeviceFault(SHARED, LOOKUP, CORRUPTED, real=True) in plan_of(shares=True, on_gpu=False)


def _answer(*thoughts: list[float]) -> Answer:
    tokens = tuple(range(ANSWER))
    return Answer(tokens, tuple(torch.tensor(each) for each in thoughts), None, 0.0)


def test_answers_are_compared_as_long_as_they_are_about_the_same_tokens() -> None:
    one = _answer([1.0, 2.0, 4.0], [3.0, 1.0, 0.0])
    assert distance(one, one) == 0.0
    assert distance(one._replace(thoughts=one.thoughts[:1]), one) == 0.0
    other = _answer([1.0, 2.0, 4.0], [0.0, 1.0, 3.0])
    assert distance(other, one) > 1.0
    assert distance(other._replace(tokens=(9, 9, 9, 9)), one) == 0.0  # a draw: what follows differs
    assert distance(one._replace(thoughts=()), one) == float("inf")
    bad = _answer([float("nan"), 2.0, 4.0])
    assert distance(bad, one) == float("inf")
