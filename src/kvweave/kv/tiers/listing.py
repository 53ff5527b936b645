"""Files below a folder, where some folders may be closed to us.

One that cannot be read is left out and named once in the log: its objects are misses.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from kvweave.errors import TierError

log = logging.getLogger(__name__)


class Listing:
    """Thread-safe: two threads that meet the same closed folder name it twice at worst."""

    def __init__(self, needed: Path) -> None:
        """Without `needed` there is no store at all: if it cannot be listed, TierError."""
        self._needed = needed
        self._skipped: set[Path] = set()

    def files(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        """Every file below a folder; none if it does not exist (any more)."""
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.skip(folder, error)
            return
        for entry in entries:
            try:
                is_folder = entry.is_dir(follow_symlinks=False)
            except OSError as error:  # on a file system that does not tell what a name stands for
                self.skip(folder, error)
                return
            if is_folder:
                yield from self.files(Path(entry.path))
            else:
                yield entry

    def skip(self, folder: Path, error: OSError) -> None:
        """Leave a folder out, and say so the first time."""
        if folder == self._needed:
            raise TierError(f"cannot list {folder}: {error.strerror}") from error
        if folder not in self._skipped:
            self._skipped.add(folder)
            log.warning("%s is left out: %s; make it readable", folder, error.strerror)
