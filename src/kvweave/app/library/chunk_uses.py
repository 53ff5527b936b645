"""How often each chunk of a knowledge base was in a prompt, since the process began."""

import threading
from collections import Counter
from collections.abc import Sequence

from kvweave.types import ChunkId

MOST = 100_000  # chunks with a count; beyond that the rarest half starts anew


class ChunkUses:
    """Any thread; nothing here waits."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._counts: Counter[ChunkId] = Counter()

    def saw(self, chunk_ids: Sequence[ChunkId]) -> None:
        """A prompt with these chunks was computed."""
        with self._lock:
            for chunk_id in chunk_ids:
                self._counts[chunk_id] += 1
            if len(self._counts) > self._most:
                self._counts = Counter(dict(self._counts.most_common(self._most // 2)))

    def count(self, chunk_id: ChunkId) -> int:
        with self._lock:
            return self._counts.get(chunk_id, 0)

    def most(self, limit: int) -> list[tuple[ChunkId, int]]:
        """The chunks that were in most prompts, and in how many."""
        with self._lock:
            return self._counts.most_common(limit)
