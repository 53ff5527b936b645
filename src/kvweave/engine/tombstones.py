"""What was deleted, and when: a request that found a chunk before its deletion shares it no more.

Time is a number that grows with every deletion. A request reads it before it looks for chunks and
brings it along; a chunk that was deleted since is used for that one answer and kept nowhere. The
same text brought again later is another matter: its request is younger than the deletion.

Tenants are apart: what one of them deletes is not deleted for another who has the same text, and
however much one deletes, what is remembered of another's deletions stays.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Collection

from kvweave.types import ChunkId

MOST = 100_000  # deletions remembered one by one, of each namespace


class _Namespace:
    """The deletions of one namespace."""

    def __init__(self) -> None:
        self.forgotten = 0  # requests older than this share nothing: some deletion is forgotten
        self.died: OrderedDict[str, int] = OrderedDict()  # oldest deletion first


class Tombstones:
    """Written by the engine thread alone; read by any, without a lock."""

    def __init__(self, most: int = MOST) -> None:
        self.generation = 0  # of all namespaces
        self._most = most
        self._namespaces: defaultdict[str, _Namespace] = defaultdict(_Namespace)

    def add(self, chunk_ids: Collection[ChunkId], namespace: str = "") -> None:
        """Note that these chunks were deleted now."""
        if not chunk_ids:
            return
        generation, own = self.generation + 1, self._namespaces[namespace]
        for name in chunk_ids:
            own.died[name] = generation
            own.died.move_to_end(name)
        while len(own.died) > self._most:
            own.forgotten = own.died.popitem(last=False)[1]
        self.generation = generation  # last: a reader of it finds the names above

    def add_all(self, namespace: str = "") -> None:
        """Note that any chunk of a namespace may have been deleted now."""
        own = self._namespaces[namespace]
        own.forgotten = self.generation + 1  # first: a reader meanwhile finds one or the other
        own.died.clear()
        self.generation += 1

    def is_gone(self, chunk_id: ChunkId, as_of: int, namespace: str = "") -> bool:
        """Whether a chunk that was found `as_of` then was deleted since. After very many deletions
        the answer is True to be safe."""
        own = self._namespaces.get(namespace)
        return own is not None and (as_of < own.forgotten or as_of < own.died.get(chunk_id, 0))
