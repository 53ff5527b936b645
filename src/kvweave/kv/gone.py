"""Chunks that others deleted, and when this store heard of it.

Whoever removes a document deletes its chunk KV wherever they find it, which takes a while; requests
here that found the document before go on meanwhile. What they load, from bytes that lay there when
the deletion was heard of, is theirs alone: no copy of it is kept. Bytes that were saved since are
another matter, and so are chunks that somebody has brought back.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection

from kvweave.kv.provenance import Provenance

_MOST = 100_000  # deletions remembered one by one

Known = Callable[[Collection[str]], Collection[str]]


def _none(chunk_ids: Collection[str]) -> Collection[str]:
    return ()


class Gone:
    """Thread-safe. Time is a number that grows with every deletion heard of."""

    def __init__(self, most: int = _MOST) -> None:
        self.now = 0
        self.known: Known = _none  # which of some chunks exist; may block on IO
        self._most = most
        self._forgotten = 0  # of what is older than this some deletion is forgotten
        self._died: OrderedDict[str, int] = OrderedDict()  # oldest deletion first
        self._lock = threading.Lock()

    def add(self, chunk_ids: Collection[str] | None) -> None:
        """These were deleted, as we hear now. None: nobody knows which, so perhaps any."""
        with self._lock:
            self.now += 1
            if chunk_ids is None:
                self._died.clear()
                self._forgotten = self.now
            for name in chunk_ids or ():
                self._died[name] = self.now
                self._died.move_to_end(name)
            while len(self._died) > self._most:
                self._forgotten = self._died.popitem(last=False)[1]

    def covers(self, of: Provenance | None, since: int) -> bool:
        """Whether bytes that were there at `since` carry text of what was deleted later, and is not
        back. May block on IO, where there is something to ask."""
        if since == self.now:
            return False
        names = () if of is None else (of.chunk, *of.behind)
        with self._lock:
            oldest = self._forgotten  # perhaps gone: nobody remembers
            died = {name: self._died.get(name, oldest) for name in names}
        died = {name: when for name, when in died.items() if when > since}
        if not died:
            return False
        if not died.keys() <= set(self.known(list(died))):
            return True
        with self._lock:
            for name, when in died.items():
                if self._died.get(name) == when:  # not deleted once more meanwhile
                    del self._died[name]
        return False
