"""Result files: one per question and device, every run inside, and all in the table of bench/."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from common import results

BENCH = Path(__file__).resolve().parents[2] / "bench"
KEPT = sorted((BENCH / "results").iterdir())
TABLE = (BENCH / "README.md").read_text()


def test_a_run_is_added_behind_earlier_ones_and_saved_again_by_the_process_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "x-cpu.json"
    monkeypatch.setattr(results, "STARTED", "then")
    results.finish("How fast?\n\nMore of it.", {"bench": "x", "ms": 3}, out)
    monkeypatch.setattr(results, "STARTED", "now")
    results.save_run("How fast?", {"bench": "x", "cells": [{"ms": 1}]}, out)
    results.save_run("How fast?", {"bench": "x", "cells": [{"ms": 1}, {"ms": 2}]}, out)
    found = results.read_results(out)
    assert found["question"] == "How fast?"
    assert [run["date"] for run in found["runs"]] == ["then", "now"]
    assert found["runs"][0]["ms"] == 3
    assert all(0 <= run["stolen"] <= 1 for run in found["runs"])
    assert found["runs"][1]["cells"] == [{"ms": 1}, {"ms": 2}]
    told = json.loads(capsys.readouterr().out)
    assert 0 <= told.pop("stolen") <= 1
    assert told == {"bench": "x", "ms": 3}


@pytest.mark.parametrize(
    "value", [[], {}, [{"a": 1.5}] * 99, ["ä"] * 99, -0.0, None, "two\nlines"], ids=repr
)
def test_what_is_written_is_read_again(tmp_path: Path, value: Any) -> None:
    wanted = {"question": "Why?", "runs": [{"date": "now", "value": value}] * 2}
    results.write_results(wanted, tmp_path / "x.json")
    assert results.read_results(tmp_path / "x.json") == wanted


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_a_kept_result_says_where_it_comes_from_and_stands_in_the_table(path: Path) -> None:
    assert f"`{path.name}`" in TABLE
    if path.suffix == ".svg":
        assert path.stat().st_size < 100_000
        return
    found = results.read_results(path)
    assert found["question"]
    name = path.name.rpartition("-")[0]
    for run in found["runs"]:
        assert {"date", "bench", "commit", "device"} <= run.keys()
        assert run["bench"] == name
    dates = [run["date"] for run in found["runs"]]
    assert dates == sorted(dates)
    (row,) = (line for line in TABLE.splitlines() if f"| `{path.name}`" in line)
    assert row.endswith(f"| {dates[-1][:10]} |")


def test_every_command_of_the_table_is_a_script() -> None:
    commands = set(re.findall(r"`(?:python )?bench/([a-z_/]+\.py)", TABLE))
    scripts = {
        str(path.relative_to(BENCH))
        for path in BENCH.rglob("*.py")
        if "__main__" in path.read_text()
    }
    assert commands == scripts


def test_where_data_lies_is_not_written_down() -> None:
    given = ["--data", "/some/where", "--quick", "--out", "a.json"]
    assert results.portable_args(given) == ["--data", "DATA", "--quick", "--out", "a.json"]
