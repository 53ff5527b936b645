"""A disk after a power cut has what was synced, and of the rest any part: small logs by hand."""

import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reliability.disk_log import Kind, Record, Recorder
from reliability.disk_model import DiskImage, Weather, weathers

LOST, KEPT = "nothing unsynced is kept", "all of it is kept"


def weather(name: str, cut: int = 10) -> Weather:
    (found,) = (w for w in weathers(cut, random.Random(0)) if w.name == name)
    return found


def image(records: list[Record], name: str, folder: Path, seed: int = 0) -> dict[str, bytes]:
    """Files by path, after a cut behind all records."""
    target = folder / f"image{seed}"
    DiskImage(records, len(records)).write(target, weather(name), random.Random(seed))
    return {
        str(path.relative_to(target)): path.read_bytes()
        for path in sorted(target.rglob("*"))
        if path.is_file()
    }


def create(node: int, path: str) -> Record:
    return Record(Kind.CREATE, node, path=path)


def write(node: int, data: bytes, offset: int = 0) -> Record:
    return Record(Kind.WRITE, node, offset, data)


def sync(node: int) -> Record:
    return Record(Kind.SYNC, node)


ROOT = 999  # an inode that the log never made


def test_a_file_is_there_when_both_it_and_its_folder_were_synced(tmp_path: Path) -> None:
    steps = [create(1, "a"), write(1, b"one"), sync(1)]
    assert image(steps, LOST, tmp_path) == {}
    steps.append(sync(ROOT))
    assert image(steps, LOST, tmp_path, 1) == {"a": b"one"}
    steps.append(write(1, b"two"))
    assert image(steps, LOST, tmp_path, 2) == {"a": b"one"}
    assert image(steps, KEPT, tmp_path, 3) == {"a": b"two"}


def test_names_without_content_are_the_trouble_of_a_missing_sync_before_a_rename(
    tmp_path: Path,
) -> None:
    rename = Record(Kind.RENAME, 1, path="a.tmp", to="a")
    steps = [create(1, "a.tmp"), write(1, b"one"), rename, sync(ROOT)]
    assert image(steps, "names without content", tmp_path) == {"a": bytes(3)}


def test_a_removal_that_was_not_synced_may_not_have_happened(tmp_path: Path) -> None:
    steps = [
        create(1, "a"),
        write(1, b"one"),
        sync(1),
        sync(ROOT),
        Record(Kind.UNLINK, 1, path="a"),
    ]
    assert image(steps, LOST, tmp_path) == {"a": b"one"}
    assert image([*steps, sync(ROOT)], LOST, tmp_path, 1) == {}


def test_a_rename_into_another_folder_never_loses_the_file(tmp_path: Path) -> None:
    steps = [
        *(Record(Kind.MKDIR, 2, path="tmp"), Record(Kind.MKDIR, 3, path="objects"), sync(ROOT)),
        *(create(1, "tmp/a"), write(1, b"one"), sync(1), sync(2)),
        Record(Kind.RENAME, 1, path="tmp/a", to="objects/a"),
    ]
    for synced in ([], [sync(2)], [sync(3)], [sync(2), sync(3)]):
        for seed in range(12):
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            folder.mkdir()
            found = image([*steps, *synced], "any part of it", folder, seed)
            assert set(found.values()) == {b"one"}
    assert image([*steps, sync(3)], LOST, tmp_path) == {"objects/a": b"one", "tmp/a": b"one"}


def test_a_torn_write_keeps_whole_sectors(tmp_path: Path) -> None:
    steps = [create(1, "a"), sync(ROOT), write(1, b"x" * 2048)]
    found = [
        image(steps, "any part of it, torn", tmp_path, seed).get("a", b"") for seed in range(9)
    ]
    assert len(set(found)) > 3
    for data in found:
        for start in range(0, len(data), 512):
            assert data[start : start + 512] in (b"x" * 512, bytes(512))


def test_a_folder_that_was_not_synced_takes_what_is_in_it_along(tmp_path: Path) -> None:
    steps = [Record(Kind.MKDIR, 2, path="kb"), create(1, "kb/a"), write(1, b"1"), sync(1), sync(2)]
    assert image(steps, LOST, tmp_path) == {}
    assert image([*steps, sync(ROOT)], LOST, tmp_path, 1) == {"kb/a": b"1"}


def test_an_inode_that_is_used_again_is_another_file(tmp_path: Path) -> None:
    steps = [
        *(create(1, "a"), write(1, b"old"), sync(1), Record(Kind.UNLINK, 1, path="a")),
        *(create(1, "b"), write(1, b"n"), sync(1), sync(ROOT)),
    ]
    assert image(steps, LOST, tmp_path) == {"b": b"n"}


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    (tmp_path / "root").mkdir()
    made = Recorder(tmp_path, tmp_path / "root")
    yield made
    made.close()


PROGRAM = """
import os, shutil, sqlite3, sys
root = sys.argv[1]
db = sqlite3.connect(root + "/a.sqlite", isolation_level=None)
db.execute("PRAGMA journal_mode = WAL")
db.execute("PRAGMA synchronous = FULL")
db.execute("CREATE TABLE t (a)")
db.execute("INSERT INTO t VALUES (1)")
os.makedirs(root + "/x/y")
with open(root + "/x/y/f.tmp", "wb") as file:
    file.write(b"hello")
    file.flush()
    os.fsync(file.fileno())
os.replace(root + "/x/y/f.tmp", root + "/x/f")
with open(root + "/x/f", "ab") as file:
    file.write(b" you")
shutil.rmtree(root + "/x/y")
db.execute("INSERT INTO t VALUES (2)")
os._exit(0)  # as a kill would: nothing is closed
"""


def test_a_real_program_is_recorded_as_it_happened(recorder: Recorder, tmp_path: Path) -> None:
    """All of it kept is the folder that the program left, byte for byte."""
    root = tmp_path / "root"
    recorder.mark("before")
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root)],
        check=True,
        env={**os.environ, **recorder.environment()},
    )
    recorder.mark("behind")
    records = recorder.read()
    assert [r.data for r in records if r.kind is Kind.MARK] == [b"before", b"behind"]
    found = image(records, KEPT, tmp_path)
    left = {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    }
    assert found == left
    assert found["x/f"] == b"hello you"
    # SQLite synced each of its transactions itself, and the names of its files with the first
    image(records, LOST, tmp_path, 1)
    with sqlite3.connect(tmp_path / "image1" / "a.sqlite") as db:
        assert [a for (a,) in db.execute("SELECT a FROM t")] == [1, 2]
    db.close()


def test_what_the_log_cannot_see_is_not_passed_over(recorder: Recorder, tmp_path: Path) -> None:
    program = (
        "import mmap, sys; f = open(sys.argv[1] + '/m', 'w+b'); f.truncate(4096);"
        "mmap.mmap(f.fileno(), 4096)[:2] = b'hi'"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "root")],
        check=True,
        env={**os.environ, **recorder.environment()},
    )
    with pytest.raises(RuntimeError, match="the log misses a change: mmap"):
        recorder.read()
