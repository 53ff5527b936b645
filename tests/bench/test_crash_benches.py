"""The crash benches, a short run of each: they find nothing, and would find something."""

import random
import shutil
from pathlib import Path

import pytest

from reliability.agreement import check_folder
from reliability.crash_world import KB, CrashWorld
from reliability.disk_log import Kind
from reliability.disk_model import DiskImage, weathers
from reliability.kills import run_kills
from reliability.power import choose_cuts, ledger_at, record_run, run_power_cuts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NOTHING = ("lost_documents", "deleted_documents_back", "wrong_answers", "disagreements")


def test_a_few_kills_lose_nothing(tmp_path: Path) -> None:
    result = run_kills(8, seed=11, folder=tmp_path)
    assert result["failures"] == []
    assert result["kills"] >= 8
    assert {name: result[name] for name in NOTHING} == dict.fromkeys(NOTHING, 0)


def test_a_few_power_cuts_lose_nothing(tmp_path: Path) -> None:
    result = run_power_cuts(21, seed=11, changes=10, folder=tmp_path)
    assert result["failures"] == []
    assert result["power_cuts"] == 21
    assert result["acknowledged_changes"] >= 10
    assert {name: result[name] for name in NOTHING} == dict.fromkeys(NOTHING, 0)


def test_a_product_that_synced_nothing_would_lose_documents(tmp_path: Path) -> None:
    """The same run, its syncs struck from the log."""
    world = CrashWorld(tmp_path / "world", forks=False)
    records = [r for r in record_run(world, tmp_path, 12, 8) if r.kind is not Kind.SYNC]
    lost = 0
    for number, cut in enumerate(choose_cuts(records, 8, 12)):
        rng = random.Random(number)
        image = tmp_path / "image"
        DiskImage(records, cut).write(image, weathers(cut, rng)[0], rng)
        found, _ = check_folder(image / KB, ledger_at(records, cut), world.embedder)
        lost += len(found.lost)
        shutil.rmtree(image)
    assert lost
