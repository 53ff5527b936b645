"""Front copies: KV of chunks computed right behind the preamble, made before it is asked for.

A chunk that stands first in a prompt is exact there with its isolated KV, and needs no row
recomputed. A chunk that stood first was computed so, and its copy is taken from that prompt
(`kv_behind.py` has it kept). Here copies are made of chunks that are likely to be next: those that
questions found, most often first, once all chunks have KV. What was never found gets none, and the
copies take a bounded share of what the chunks' own KV takes. A copy that is not there costs no
answer its exactness: the chunk is computed with the prompt.

Copies leave as much room as the chunks' own KV takes, and when a knowledge base has grown into that
room they give way, the last made first: those are asked for least. A tier that others share gets
none ahead.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.lookup import Residency
from kvweave.types import Chunk, ChunkId

MOST_LOST = 3  # copies in a row that no tier kept: then no more are made until documents change


class FrontCopy(NamedTuple):
    key: ChunkKey
    size_bytes: int


class FrontKV:
    """The front copies of one base. Counts and `nothing_left` on any thread, all else on the
    maker's."""

    def __init__(
        self, kb: KnowledgeBase, encoder: ChunkEncoder, room_bytes: Callable[[], int]
    ) -> None:
        """`room_bytes`: how many bytes copies that are made ahead may still take."""
        self._kb = kb
        self._encoder = encoder
        self._room_bytes = room_bytes
        self._lock = threading.Lock()  # guards the rest
        self._copies: dict[ChunkId, FrontCopy] = {}  # that are there
        self._missing: dict[ChunkId, int] = {}  # tokens of chunks without one
        self._num_lost = 0  # in a row

    # ---- any thread

    def num_done(self) -> int:
        """Chunks that have a front copy beside their KV."""
        with self._lock:
            return len(self._copies)

    def num_bytes(self) -> int:
        with self._lock:
            return sum(copy.size_bytes for copy in self._copies.values())

    def nothing_left(self, found: Sequence[ChunkId]) -> bool:
        """Whether no copy is to be made now. `found` as in `next`."""
        return self._choose(found) is None

    # ---- the maker's thread

    def add(self, chunks: Sequence[Chunk]) -> None:
        """These have KV behind their encoding context: which of them lack a front copy? Where that
        KV is isolated itself there is none to be made."""
        encoder = self._encoder
        named = []
        for chunk in chunks:
            key = encoder.exact_key(chunk.token_ids)
            if key == encoder.key(chunk.token_ids):
                self.forget(chunk.id)  # it may have had neighbours before
            else:
                named.append((chunk, key))
        peeks = encoder.store.peek([key for _, key in named])
        with self._lock:
            self._num_lost = 0
            for (chunk, key), peek in zip(named, peeks, strict=True):
                if peek.residency is Residency.ABSENT:
                    self._missing[chunk.id] = len(chunk.token_ids)
                else:
                    self._note(chunk, key, peek.size_bytes)

    def next(self, found: Sequence[ChunkId]) -> Chunk | None:
        """The chunk whose copy should be made next; None if there is none or no room for it.
        `found`: chunks that questions found, most often first."""
        while (chunk_id := self._choose(found)) is not None:
            chunk = self._kb.catalogue.chunks([chunk_id]).get(chunk_id)
            if chunk is not None:
                return chunk
            self.forget(chunk_id)  # it went since the last look
        return None

    def done(self, chunk: Chunk) -> None:
        """A copy was made, or could not be: then it is left until the knowledge base is opened
        again, for the chunk is served without."""
        self.forget(chunk.id)
        key = self._encoder.exact_key(chunk.token_ids)
        (peek,) = self._encoder.store.peek([key])
        is_kept = peek.residency is not Residency.ABSENT
        with self._lock:
            self._num_lost = 0 if is_kept else self._num_lost + 1
            if is_kept:
                self._note(chunk, key, peek.size_bytes)

    def give_way(self, num_bytes: int) -> bool:
        """Delete copies until so many bytes are free. False: all of them would not do."""
        freed, keys = 0, []
        with self._lock:
            if sum(copy.size_bytes for copy in self._copies.values()) < num_bytes:
                return False
            while freed < num_bytes:
                _, copy = self._copies.popitem()
                freed += copy.size_bytes
                keys.append(copy.key)
        self._encoder.store.delete(keys)
        return True

    def forget(self, chunk_id: ChunkId) -> None:
        """A chunk is no more, or its copy is not to be made."""
        with self._lock:
            self._missing.pop(chunk_id, None)
            self._copies.pop(chunk_id, None)

    def keep(self, alive: set[ChunkId]) -> None:
        """Chunks other than these are no more."""
        with self._lock:
            self._missing = {c: n for c, n in self._missing.items() if c in alive}
            self._copies = {c: copy for c, copy in self._copies.items() if c in alive}

    def _choose(self, found: Sequence[ChunkId]) -> ChunkId | None:
        """The first of these without a copy, if there is room for it."""
        with self._lock:
            chunk_id = next((c for c in found if c in self._missing), None)
            if chunk_id is None or self._num_lost >= MOST_LOST:
                return None
            num_tokens = self._missing[chunk_id]
        fits = self._encoder.plain_bytes(num_tokens) <= self._room_bytes()
        return chunk_id if fits else None

    def _note(self, chunk: Chunk, key: ChunkKey, size_bytes: int | None) -> None:
        """Lock is held. There is a copy."""
        size = size_bytes or self._encoder.plain_bytes(len(chunk.token_ids))
        self._missing.pop(chunk.id, None)
        self._copies[chunk.id] = FrontCopy(key, size)
