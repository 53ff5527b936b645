"""Killed at any moment: the store opens, every object is whole, nothing acknowledged is lost.

SIGKILL stops a process between any two instructions. It does not cut the power: for that, that
bytes are synced before their name appears, see contracts/test_tier_trouble.py.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.kv.format.objects import verify_object
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import DiskTierConfig
from kvweave.kv.tiers.disk import DiskTier
from worlds.kv import is_layer_of, make_config, make_key
from worlds.kv_checks import check_store

TESTS = Path(__file__).parents[1]
SRC = TESTS.parent / "src"
FRESH_EVERY = 25  # trials per folder: verifying all that piled up takes longer and longer


@pytest.fixture(scope="module")
def writer() -> Iterator["subprocess.Popen[str]"]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), str(TESTS)])}
    script = str(TESTS / "worlds" / "crash_writer.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, script], env=env, text=True, **pipes) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def kill_after(process: "subprocess.Popen[str]", root: Path, first: int, wait_s: float) -> None:
    """Let a writer run for `wait_s` and kill it."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(root, first, file=process.stdin, flush=True)
    lines = [process.stdout.readline().strip() for _ in range(2)]  # its pid and "ready"
    child = int(next(line for line in lines if line != "ready"))
    time.sleep(wait_s)
    os.kill(child, signal.SIGKILL)
    assert process.stdout.readline().strip() == "dead"


def check_root(root: Path) -> int:
    """Everything that must hold after a crash. Returns how many objects there are."""
    notes = root / "acknowledged"
    acknowledged = [int(n) for n in notes.read_text().split()] if notes.exists() else []
    tier = DiskTier(DiskTierConfig(root))  # opens, and sweeps what the dead writer left
    assert tier.temporaries() == []
    found = [stored.key for stored in tier.scan()]
    for key in found:
        reader = tier.open(key)
        assert reader is not None
        verify_object(reader, key)  # raises if one byte is torn
        reader.close()
    lost = {make_key(n) for n in acknowledged} - set(found)
    assert not lost, f"{len(lost)} acknowledged objects are gone"
    with KVStore(make_config(root, disk_chunks=10_000)) as store:
        latest = acknowledged[-3:]
        with store.acquire([make_key(n) for n in latest]) as lease:
            layers = store.load(lease).wait_layer(1)
            assert all(is_layer_of(n, 1, layers[make_key(n)]) for n in latest)
        check_store(store)
    return len(found)


@pytest.mark.parametrize(
    "num_kills", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_writer_killed_at_random_moments_leaves_a_whole_store(
    writer: "subprocess.Popen[str]", tmp_path: Path, num_kills: int
) -> None:
    rng = random.Random(num_kills)
    num_objects = 0
    for trial in range(num_kills):
        root = tmp_path / f"store{trial // FRESH_EVERY}"
        root.mkdir(exist_ok=True)
        kill_after(writer, root, first=trial * 1000, wait_s=rng.uniform(0.0, 0.06))
        num_objects = check_root(root)
    assert num_objects > 0, "no writer lived long enough to write: the test shows nothing"
