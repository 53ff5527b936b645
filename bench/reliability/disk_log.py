"""A log of what processes asked of the file system below one folder, and of what clients were told.

`Recorder` compiles `disk_log.c` (it needs gcc), gives the variables that a command is run with, and
adds marks to the log: who was told what, at its place between the calls. `read_log` reads it again.
"""

import os
import struct
import subprocess
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("disk_log.c")
HEAD = struct.Struct("<IIIIQq")


class Kind(IntEnum):
    """As disk_log.c has them."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    SYNC = 4
    RENAME = 5
    UNLINK = 6
    MKDIR = 7
    RMDIR = 8
    LINK = 9
    MARK = 10
    UNSEEN = 11


class Record(NamedTuple):
    """One call that succeeded, or a mark."""

    kind: Kind
    node: int  # inode of what it is about
    offset: int = 0  # of a write; the size after a truncation
    data: bytes = b""  # what was written; the words of a mark
    path: str = ""  # below the root; of a rename or link the old one
    to: str = ""  # of a rename or link the new one


class Recorder:
    """Records commands over the folder `root`, which is empty. One process marks; any number of
    them may be recorded."""

    def __init__(self, folder: Path, root: Path) -> None:
        """`folder` takes the log and the library. Raises RuntimeError where there is no gcc."""
        self.log = folder / "disk.log"
        self._library = folder / "disk_log.so"
        self._root = root.resolve()
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE), "-ldl"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            raise RuntimeError(f"cannot compile {SOURCE.name}; install gcc: {said}") from error
        self._file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self._library),
            "DISK_LOG": str(self.log),
            "DISK_ROOT": str(self._root),
        }

    def mark(self, words: str) -> None:
        """Everything that was done before this call stands in front of it in the log. In one
        piece: recorded processes append to the same file."""
        data = words.encode()
        os.write(self._file, HEAD.pack(Kind.MARK, len(data), 0, 0, 0, 0) + data)

    def read(self) -> list[Record]:
        return list(read_log(self.log, self._root))

    def close(self) -> None:
        os.close(self._file)


def read_log(log: Path, root: Path) -> Iterator[Record]:
    """Raises RuntimeError for a log that missed something."""
    data, at, base = log.read_bytes(), 0, str(root)
    while at < len(data):
        number, first_bytes, second_bytes, _, node, offset = HEAD.unpack_from(data, at)
        at += HEAD.size
        first, second = (
            data[at : at + first_bytes],
            data[at + first_bytes : at + first_bytes + second_bytes],
        )
        at += first_bytes + second_bytes
        kind = Kind(number)
        if kind is Kind.UNSEEN:
            raise RuntimeError(f"the log misses a change: {first.decode()}")
        if kind in (Kind.WRITE, Kind.MARK):
            yield Record(kind, node, offset, first)
        else:
            below = [each.decode().removeprefix(base).lstrip("/") for each in (first, second)]
            yield Record(kind, node, offset, path=below[0], to=below[1])
