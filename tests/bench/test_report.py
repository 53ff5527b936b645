"""docs/results.md and docs/coverage.md say what the stored results say, and how old those are."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import report
from common.files import REPO, RESULTS
from kvweave.cli.bench import read_table
from report_parts import coverage_page, history, readme_table, results_page
from report_parts.figures import Figure, Result, runs_of, show
from report_parts.papers import NONE, PAPERS, Claim
from report_parts.plots import PICTURES, draw
from report_parts.shown import SHOWN

CLAIMS = [claim for claims in PAPERS.values() for claim in claims]


@pytest.mark.parametrize(
    "page", [results_page, coverage_page, readme_table], ids=lambda page: page.PAGE.name
)
def test_the_pages_are_made_again_byte_for_byte(page: Any) -> None:
    marked = results_page.marked_in(results_page.PAGE.read_text())
    assert page.render(marked) == page.PAGE.read_text(), "`make results` writes it anew"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_again_byte_for_byte_and_stands_on_the_page(name: str) -> None:
    drawn = draw(PICTURES[name]())
    assert drawn == (RESULTS / name).read_text(), "`make results` draws it anew"
    ElementTree.fromstring(drawn)  # a browser shows nothing of what is not well-formed
    assert drawn.count("<circle") > 5
    assert any(name in bench.pictures for bench in read_table().values())


def test_no_result_on_the_pages_is_older_than_its_code_without_saying_so() -> None:
    if why := history.why_unknown():
        pytest.skip(f"NOT CHECKED: {why}")
    marked = results_page.marked_in(results_page.PAGE.read_text())
    unsaid = sorted(report.older_runs() - marked)
    assert not unsaid, f"measure again, or have `make results` mark them as older: {unsaid}"


def test_every_result_is_on_the_page_and_names_code_that_is_there() -> None:
    shown, kept = [result.file for result in SHOWN], [p.stem for p in RESULTS.glob("*.json")]
    assert sorted(shown) == sorted(kept), "each has an entry in bench/report_parts/shown.py"
    assert read_table().keys() == {result.file for result in SHOWN}
    for result in SHOWN:
        names = [figure.name for figure in result.figures]
        assert names, result.file
        assert len(set(names)) == len(names), result.file
        for spec in result.measures:
            path = spec.removeprefix(":(exclude)")
            assert (REPO / path).exists(), f"{result.file} measures {path}, which is gone"


def test_a_figure_is_of_the_newest_run_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [{"ms": 1, "s": 5}, {"ms": 2, "s": None}]
    monkeypatch.setattr("report_parts.figures.runs_of", lambda file: runs)
    found = Result("x-cpu", (), ())
    assert show(found, Figure("ms", "", lambda run: f"{run['ms']:.0f}")).text == "2"
    assert show(found, Figure("s", "", lambda run: f"{run['s']:.0f}")).run is runs[0]
    with pytest.raises(LookupError, match="x-cpu: no run has 'gone'"):
        show(found, Figure("gone", "", lambda run: run["gone"]))


def test_the_marks_of_a_page_are_read_from_it() -> None:
    file = SHOWN[0].file
    key = results_page.key_of(file, show(SHOWN[0], SHOWN[0].figures[0]).run)
    assert results_page.marked_in(results_page.render({key})) == {key}
    assert results_page.marked_in(results_page.render(set())) == set()
    assert len(runs_of(file)) > 1


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.where)
def test_a_row_of_the_coverage_page_is_whole(claim: Claim) -> None:
    assert all(cell.strip() for cell in claim)
    assert coverage_page.verdict_of(claim) == "not had here" or claim.command != NONE
    for part in claim.command.split("`, `"):
        script = part.split()[0]
        assert script in (NONE, "make", "kvweave") or (REPO / script).is_file(), script


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Writes files into a repository of its own and commits them; returns the id."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def write(**files: str) -> str:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        git("add", ".")
        git("commit", "-m", "x")
        return git("rev-parse", "--short", "HEAD")

    git("init")
    monkeypatch.setattr(history, "REPO", tmp_path)
    for remembered in (history._is_changed_now, history._is_in_history):
        remembered.cache_clear()
    yield write
    for remembered in (history._is_changed_now, history._is_in_history):
        remembered.cache_clear()


def test_a_change_behind_a_run_makes_it_older(commit: Callable[..., str], tmp_path: Path) -> None:
    run = {"date": "2026-01-01T00:00:00+00:00", "commit": commit(src__a="1", src__b="1")}
    assert history.num_changes("x-cpu", run, ["src/a"]) == 0
    commit(src__b="2")
    assert history.num_changes("x-cpu", run, ["src/a"]) == 0
    assert history.num_changes("x-cpu", run, ["src"]) == 1
    assert history.num_changes("x-cpu", run, ["src", ":(exclude)src/b"]) == 0
    (tmp_path / "src" / "a").write_text("not committed")
    history._is_changed_now.cache_clear()
    assert history.num_changes("x-cpu", run, ["src/a"]) == 1


def test_a_run_on_a_changed_tree_belongs_to_the_commit_that_brought_it(
    commit: Callable[..., str],
) -> None:
    run = {"date": "2026-01-01T00:00:00+00:00", "commit": commit(src__a="1") + "+"}
    assert history.num_changes("x-cpu", run, ["src/a"]) == 0, "it is not committed yet"
    result = f'{{"date": "{run["date"]}"}}'
    commit(src__a="2", **{"bench__results__x-cpu.json": result})
    assert history.num_changes("x-cpu", run, ["src/a"]) == 1, "the first commit is behind its date"
    commit(src__a="3")
    assert history.num_changes("x-cpu", run, ["src/a"]) == 2


def test_a_clone_without_history_is_told_apart(
    commit: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(src__a="1")
    commit(src__a="2")
    assert history.why_unknown() == ""
    shallow = tmp_path.with_name("shallow")
    subprocess.run(
        ["git", "clone", "-q", "--depth", "1", f"file://{tmp_path}", str(shallow)], check=True
    )
    monkeypatch.setattr(history, "REPO", shallow)
    assert "shallow" in history.why_unknown()
