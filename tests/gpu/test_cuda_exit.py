"""A process that page-locked memory ends well, however much of it is still locked.

Needs bare PyTorch and a CUDA device: `pytest -m gpu tests/gpu`.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

CODE = """
from kvweave.kv.format.memory import new_memory
kept = [new_memory(512 << 20, pinned=True) for _ in range(4)]
del kept[:3]
"""


def test_a_process_ends_while_memory_is_unlocked() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert "terminate" not in ended.stderr
