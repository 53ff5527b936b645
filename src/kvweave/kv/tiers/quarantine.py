"""Damaged objects put aside: out of the store's sight, kept for a look at what went wrong.

The newest stay, up to a byte bound. Several processes may share the folder, so a file may be gone
by the time it is looked at.
"""

import os
import time
from pathlib import Path

from kvweave.kv.tiers.listing import Listing


class Quarantine:
    """One folder. Any thread; OSErrors are the caller's to word."""

    def __init__(self, folder: Path, max_bytes: int, listing: Listing) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._listing = listing

    def put(self, path: Path) -> None:
        """Take a file in, and let the oldest go. FileNotFoundError: it is not there."""
        self.folder.mkdir(exist_ok=True)
        os.replace(path, self.folder / f"{path.stem}.{time.time_ns()}{path.suffix}")
        self._trim()

    def files(self) -> list[Path]:
        """What was put aside, oldest first."""
        found = [Path(entry.path) for entry in self._listing.files(self.folder)]
        return sorted(found, key=lambda path: (_put_aside_ns(path), path.name))

    def size_bytes(self) -> int:
        return sum(_size_bytes(path) for path in self.files())

    def clear(self) -> int:
        """Delete all of it; returns how many bytes that freed."""
        return sum(_delete(path) for path in self.files())

    def _trim(self) -> None:
        kept_bytes = 0
        for path in reversed(self.files()):
            kept_bytes += _size_bytes(path)
            if kept_bytes > self._max_bytes:
                _delete(path)


def _put_aside_ns(path: Path) -> int:
    """When a file was put aside, read from its name; its own times are those of its writing."""
    digits = path.stem.rpartition(".")[2]
    return int(digits) if digits.isdecimal() else 0


def _size_bytes(path: Path) -> int:
    """Size of a file; 0 for one that is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _delete(path: Path) -> int:
    """Delete a file and return the bytes freed; 0 where another process was faster."""
    size_bytes = _size_bytes(path)
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    return size_bytes
