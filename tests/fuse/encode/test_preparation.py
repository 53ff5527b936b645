"""preparation.json: the encoding stays as stored, and what is wrong in it is said by name."""

import threading
from pathlib import Path

import pytest

from kvweave.errors import ConfigError
from kvweave.fuse.encode.preparation import (
    FILE,
    Preparation,
    choose_preparation,
    read_preparation,
    write_preparation,
)

STORED = Preparation.parse("neighbours:2")


@pytest.mark.parametrize(
    ("encoding", "chosen"), [(None, STORED), ("isolated", Preparation.parse("isolated"))]
)
def test_what_is_not_given_stays_as_stored(
    tmp_path: Path, encoding: str | None, chosen: Preparation
) -> None:
    write_preparation(tmp_path, STORED)
    assert choose_preparation(tmp_path, encoding) == chosen


def test_a_new_folder_has_filler(tmp_path: Path) -> None:
    assert choose_preparation(tmp_path) == Preparation.parse("filler")


def test_a_file_of_a_version_that_noted_extras_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"encoding": "neighbours:2", "extras": ["inter"]}')
    assert read_preparation(tmp_path) == STORED


@pytest.mark.parametrize(
    "text",
    [
        '{"encoding": 3}',
        '{"encoding": "magic"}',
        "[]",
        "{",
        "",
        "\xff",
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"preparation\.json cannot be read \(.+\); delete it"):
        read_preparation(tmp_path)


def test_several_may_write_it_at_once(tmp_path: Path) -> None:
    """One took the other's temporary file away: an upload was a 500."""
    prepared, failed = Preparation.parse("filler:2"), list[Exception]()

    def write() -> None:
        try:
            for _ in range(50):
                write_preparation(tmp_path, prepared)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failed == []
    assert read_preparation(tmp_path) == prepared
    assert [path.name for path in tmp_path.iterdir()] == ["preparation.json"]
