"""Documents that another process removed leave the memory of this one: tree, store, conversations.

The catalogue's generation is read before every request. Where it has moved on, what went since is
forgotten as if it had been removed here: out of the knowledge tree, with a tombstone that requests
under way and conversations see (`engine/tombstones.py`), and out of the host tier. Files are left
to the process that removed the document, and to the next writer should that one have been killed. A
process that has not looked for so long that the catalogue no longer names what went
(`corpus/removals.py`) forgets all that it cannot find in the catalogue.

Any thread.
"""

import threading
from collections.abc import Callable, Collection
from pathlib import Path

from kvweave.corpus.removals import RemovalReader
from kvweave.types import ChunkId

Forget = Callable[[Collection[ChunkId] | None], object]  # None: any may have been


class RemovalWatch:
    """What one open knowledge base still has to hear of. `close` it."""

    def __init__(self, catalogue: Path, uid: str, heard: dict[str, int], *forget: Forget) -> None:
        """`uid` is that of the catalogue. `heard` has the generation up to which each one was heard
        of; it outlives this, as do the tree and conversations: what went while the knowledge base
        was closed is news at the first request."""
        self._reader = RemovalReader(catalogue)
        self._uid = uid
        self._heard = heard
        self._forget = forget
        self._lock = threading.Lock()
        self._generation = heard.setdefault(uid, self._reader.generation())

    def catch_up(self) -> None:
        """Forget what went. Microseconds if nothing did; else waits for a step of the engine, and
        so do requests that come meanwhile."""
        if self._reader.generation() == self._generation:
            return
        with self._lock:
            removed = self._reader.since(self._generation)
            if removed.chunk_ids is None or removed.chunk_ids:
                for forget in self._forget:
                    forget(removed.chunk_ids)
            # last: a failure leaves it to the next request
            self._generation = self._heard[self._uid] = removed.generation

    def close(self) -> None:
        self._reader.close()
