"""Damaged objects put aside: out of the store's sight, kept for whoever wants to know why.

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
        self._folder = folder
        self._max_bytes = max_bytes
        self._listing = listing

    def put(self, path: Path) -> None:
        """Take a file in, and let the oldest go. FileNotFoundError: it is not there."""
        self._folder.mkdir(exist_ok=True)
        os.replace(path, self._folder / f"{path.stem}.{time.time_ns()}{path.suffix}")
        self._trim()

    def files(self) -> list[Path]:
        """What was put aside, oldest first."""
        return sorted(Path(entry.path) for entry in self._listing.files(self._folder))

    def clear(self) -> int:
        """Delete all of it; returns how many bytes that freed."""
        freed = 0
        for path in self.files():
            freed += path.stat().st_size
            path.unlink()
        return freed

    def _trim(self) -> None:
        newest_first = sorted(self.files(), key=lambda p: p.stat().st_mtime, reverse=True)
        kept = 0
        for path in newest_first:
            kept += path.stat().st_size
            if kept > self._max_bytes:
                path.unlink()
