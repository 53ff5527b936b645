"""`kvweave bench` knows the benches of this clone, and runs their scripts."""

import json
from pathlib import Path

import pytest

from kvweave.cli import bench
from worlds.running import Run

RESULTS = bench.FOLDER / "results"


def test_every_bench_of_the_table_is_listed_with_what_it_asks_and_needs(run: Run) -> None:
    listed = json.loads(run("bench", "list", "--json").out)
    names = {each["name"] for each in listed}
    assert len(names) > 40
    assert names <= {path.stem for path in RESULTS.glob("*.json")}
    assert all(each["question"] and each["device"] and each["group"] for each in listed)
    assert all(each["commands"] and each["last_run"] > "2026" for each in listed)
    (ttft,) = (each for each in listed if each["name"] == "ttft-cpu")
    assert ttft["needs"] == {"--data": "DATA"}
    table = run("bench", "list").out
    assert all(f"\n{each['name']} " in table for each in listed)


def test_a_bench_gets_the_arguments_that_are_typed(run_alone: Run) -> None:
    told = run_alone("bench", "run", "ttft-cpu", "--help")
    assert told.code == 0
    assert "usage: run.py" in told.out
    wrong = run_alone("bench", "run", "planner-cpu", "--nodes", "many")
    assert wrong.code == 2
    assert "invalid int value: 'many'" in wrong.err


def test_a_bench_without_its_data_and_an_unknown_one_are_refused(run: Run) -> None:
    assert run("bench", "run", "ttft-cpu").err == (
        "kvweave: ttft-cpu needs --data DATA: bench/ttft/run.py --data DATA\n"
    )
    assert run("bench", "run", "gone").err == (
        "kvweave: there is no bench 'gone'; kvweave bench list names all\n"
    )


@pytest.mark.parametrize("words", [("list",), ("run", "ttft-cpu"), ("report",)], ids=" ".join)
def test_without_a_clone_a_line_says_where_benches_are(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "bench")
    ran = run("bench", *words)
    assert ran.code == 2
    assert ran.err.startswith("kvweave: benches are in the repository, not in the package")
