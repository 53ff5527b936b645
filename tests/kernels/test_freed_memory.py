"""What is freed is kept: the same buffer again costs no new pages."""

import os
import resource
import subprocess
import sys

import pytest

TRIED = """
import resource
import torch
from kvweave.kernels.freed_memory import keep_freed_memory

def faults():
    torch.ones(4 << 20)  # 16 MiB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(4 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = faults()
print(keep_freed_memory(), plain, faults())
"""


def run(**environment: str) -> tuple[bool, int, int]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "LD_PRELOAD"))}
    done = subprocess.run(
        [sys.executable, "-c", TRIED], capture_output=True, text=True, env=env | environment
    )
    assert done.returncode == 0, done.stderr
    kept, plain, after = done.stdout.split()
    return kept == "True", int(plain), int(after)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's alone")
def test_the_same_buffer_again_costs_no_new_pages() -> None:
    kept, plain, after = run()
    if not kept:
        pytest.skip("another C library")
    pages = 20 * (16 << 20) // resource.getpagesize()
    assert after < pages / 50
    assert after <= plain


def test_who_has_settings_of_their_own_keeps_them() -> None:
    kept, _, _ = run(MALLOC_ARENA_MAX="2")
    assert not kept
