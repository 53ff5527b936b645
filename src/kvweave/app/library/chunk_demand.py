"""Which chunks of a knowledge base questions find, most often first, across restarts."""

import json
import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from kvweave.corpus.disk_files import atomic_file
from kvweave.plan.ordering import AccessTable
from kvweave.types import ChunkId

log = logging.getLogger(__name__)

DEMAND_FILE = "demand.json"  # chunk ids in order; rebuilt from questions if it is lost
MOST_KEPT = 4096


class ChunkDemand:
    """Ranks chunks by how many of the last questions found them. Any thread, but for `keep`: that
    of one."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: where the order is kept for the next start; None: nowhere."""
        self._path = path
        self._lock = threading.Lock()  # guards the rest
        self._counts = AccessTable()
        self._newest_last: dict[ChunkId, None] = dict.fromkeys(reversed(_read(path)))
        self._is_kept = True

    def push(self, chunk_ids: Collection[ChunkId]) -> None:
        """Note what a question found."""
        with self._lock:
            self._counts.push(chunk_ids)
            for chunk_id in chunk_ids:
                self._newest_last.pop(chunk_id, None)
                self._newest_last[chunk_id] = None
            while len(self._newest_last) > 2 * MOST_KEPT:
                del self._newest_last[next(iter(self._newest_last))]
            self._is_kept = False

    def rank(self) -> list[ChunkId]:
        """Return the chunks that questions found: most often first, of the same count the last
        found first. What was kept from before stands behind."""
        with self._lock:
            found = list(reversed(self._newest_last))
            return sorted(found, key=self._counts.count, reverse=True)

    def keep(self, does_exist: Callable[[ChunkId], bool]) -> None:
        """Write the order down if it has changed, without chunks that were deleted."""
        if self._path is None or self._is_kept:
            return
        self._is_kept = True
        kept = [chunk_id for chunk_id in self.rank() if does_exist(chunk_id)]
        try:
            with atomic_file(self._path) as file:
                file.write(json.dumps(kept[:MOST_KEPT]).encode())
        except OSError as error:
            log.warning("cannot keep which chunks are in demand: %s", error.strerror)


def _read(path: Path | None) -> list[ChunkId]:
    """What was kept, most wanted first; nothing where it cannot be read."""
    try:
        kept = json.loads(path.read_text()) if path is not None else []
    except (OSError, ValueError):
        return []
    return [ChunkId(each) for each in kept if isinstance(each, str)]
