"""What was deleted, and when: a request that found a chunk before its deletion shares it no more.

Time is a number that grows with every deletion. A request reads it before it looks for chunks and
brings it along; a chunk that was deleted since is used for that one answer and kept nowhere. The
same text brought again later is another matter: its request is younger than the deletion.
"""

from collections import OrderedDict
from collections.abc import Collection

from kvweave.types import ChunkId

MOST = 100_000  # deletions remembered one by one


class Tombstones:
    """Written by the engine thread alone; read by any, without a lock."""

    def __init__(self, most: int = MOST) -> None:
        self.generation = 0
        self._most = most
        self._forgotten = 0  # requests older than this share nothing: some deletion is forgotten
        self._died: OrderedDict[str, int] = OrderedDict()  # oldest deletion first

    def add(self, chunk_ids: Collection[ChunkId]) -> None:
        """These are no more, from now on."""
        if not chunk_ids:
            return
        generation = self.generation + 1
        for name in chunk_ids:
            self._died[name] = generation
            self._died.move_to_end(name)
        while len(self._died) > self._most:
            self._forgotten = self._died.popitem(last=False)[1]
        self.generation = generation  # last: a reader of it finds the names above

    def add_all(self) -> None:
        """Any may be no more, from now on: it is not known which."""
        self._forgotten = self.generation + 1  # first: a reader meanwhile finds one or the other
        self._died.clear()
        self.generation += 1

    def is_gone(self, chunk_id: ChunkId, as_of: int) -> bool:
        """Whether a chunk that was there `as_of` then was deleted since. Of long ago: perhaps."""
        return as_of < self._forgotten or as_of < self._died.get(chunk_id, 0)
