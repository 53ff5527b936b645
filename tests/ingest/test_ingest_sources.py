"""What is found below a folder, what is left out, and what lies outside the allowed folders."""

import os
from pathlib import Path

import pytest

from kvweave.errors import CorpusError
from kvweave.ingest.report import Skipped
from kvweave.ingest.sources import FoundFile, Ignored, Selection, ensure_inside, find_files


def make_tree(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("text")
    return root


def found(path: Path, **selection: tuple[str, ...]) -> list[str]:
    """Names below `path`, in the order found."""
    items = find_files(path, Selection(**selection))  # type: ignore[arg-type]
    return [str(i.path.relative_to(path.resolve())) for i in items if isinstance(i, FoundFile)]


def test_folders_are_walked_in_a_stable_order_without_hidden_files(tmp_path: Path) -> None:
    make_tree(tmp_path, "b.txt", "a/z.md", "a/b/c.html", ".git/x.txt", "a/.hidden.md", "p.exe")
    assert found(tmp_path) == ["a/b/c.html", "a/z.md", "b.txt"]
    assert sum(isinstance(i, Ignored) for i in find_files(tmp_path, Selection())) == 1


def test_include_and_exclude_match_names_paths_and_folders(tmp_path: Path) -> None:
    make_tree(tmp_path, "a.md", "a.txt", "old/b.md", "new/c.md")
    assert found(tmp_path, include=("*.md",)) == ["a.md", "new/c.md", "old/b.md"]
    assert found(tmp_path, include=("*.md",), exclude=("old/*",)) == ["a.md", "new/c.md"]
    assert found(tmp_path, exclude=("old", "a.*")) == ["new/c.md"]


def test_a_symlink_loop_is_reported_once_and_not_followed(tmp_path: Path) -> None:
    make_tree(tmp_path, "a/x.txt")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    items = list(find_files(tmp_path, Selection()))
    assert [i.path.name for i in items if isinstance(i, FoundFile)] == ["x.txt"]
    reasons = {Path(i.source).name: i.reason for i in items if isinstance(i, Skipped)}
    assert reasons.keys() == {"up", "self.txt"}
    assert reasons["up"] == "a symlink loop: the folder contains itself"
    assert "symbolic links" in reasons["self.txt"] or "symlink loop" in reasons["self.txt"].lower()


def test_folders_linked_across_are_walked_once_each(tmp_path: Path) -> None:
    names = [str(n) for n in range(9)]  # by every path there would be a million of them
    make_tree(tmp_path, *(f"{name}/x.txt" for name in names))
    for name in names:
        for other in names:
            if name != other:
                (tmp_path / name / f"link{other}").symlink_to(tmp_path / other)
    items = list(find_files(tmp_path, Selection()))
    files = [i.path for i in items if isinstance(i, FoundFile)]
    assert sorted(files) == [tmp_path.resolve() / name / "x.txt" for name in names]
    assert len(items) < 100


def test_a_path_that_is_not_there_is_reported(tmp_path: Path) -> None:
    (item,) = find_files(tmp_path / "none.txt", Selection())
    assert item == Skipped(str(tmp_path / "none.txt"), "no such file or directory")
    (item,) = find_files(Path("a\0b.txt"), Selection())
    assert isinstance(item, Skipped)
    (item,) = find_files(Path("a\0b.txt"), Selection(roots=(tmp_path,)))
    assert isinstance(item, Skipped)


def test_a_name_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("text")
    (item,) = find_files(tmp_path, Selection())
    assert isinstance(item, Skipped)
    assert "not valid UTF-8" in item.reason


def test_nothing_outside_the_allowed_folders_is_found(tmp_path: Path) -> None:
    make_tree(tmp_path, "in/a.txt", "out/secret.txt")
    (tmp_path / "in" / "link.txt").symlink_to(tmp_path / "out" / "secret.txt")
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "out")
    selection = Selection(roots=(tmp_path / "in",))
    inside = list(find_files(tmp_path / "in", selection))
    assert [i.path.name for i in inside if isinstance(i, FoundFile)] == ["a.txt"]
    assert [i.reason for i in inside if isinstance(i, Skipped)] == [
        "outside the allowed folders"
    ] * 2
    for path in (tmp_path / "out", tmp_path / "in" / ".." / "out" / "secret.txt", Path("/")):
        (item,) = find_files(path, selection)
        assert isinstance(item, Skipped)
        assert item.reason == "outside the allowed folders"


def test_ensure_inside_follows_links_before_it_compares(tmp_path: Path) -> None:
    make_tree(tmp_path, "in/a.txt", "inner/b.txt", "out/c.txt")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    assert ensure_inside([tmp_path / "in"], tmp_path / "in" / "a.txt").name == "a.txt"
    for path in ("in/link/c.txt", "in/../out/c.txt", "inner/b.txt", "in/link/missing"):
        with pytest.raises(CorpusError, match="outside the allowed folders"):
            ensure_inside([tmp_path / "in"], tmp_path / path)
