"""Chunk KV behind one preamble, and the preambles that requests come with.

Chunk KV belongs to the system prompt it was computed behind. Most requests share one, but a client
may send its own: what it asks about is then kept behind that one too, as far as it comes back.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from kvweave.app.library.kv_maker import KVMaker
from kvweave.app.library.promotion import ChunkPromotion
from kvweave.app.library.runtime import EngineClient
from kvweave.corpus.chunker import make_chunk_id
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.protocol import Prefix
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.types import ChunkId

MOST_PREAMBLES = 16  # of one store: those that were not used for longest start anew


class PreambleKey(NamedTuple):
    """Whose chunk KV, and what stands in front of it."""

    tenant: str  # "": of those without one
    preamble: tuple[int, ...]  # token ids


class KVBehind:
    """What a store has of chunks behind one preamble, and what makes more of it. Any thread."""

    def __init__(
        self,
        encoder: ChunkEncoder,
        client: EngineClient,
        promotion: ChunkPromotion | None,
        maker: KVMaker | None = None,
        *,
        is_own: bool,
    ) -> None:
        """`promotion` stores chunks that come back; None: nothing does. `maker` hears what was
        asked for. `is_own`: the preamble that documents are ingested behind."""
        self.encoder = encoder
        self.is_own = is_own
        self._client = client
        self._promotion = promotion
        self._maker = maker
        self._preamble: Prefix | None = None

    @property
    def store(self) -> KVStore:
        return self.encoder.store

    def preamble(self) -> Prefix:
        """The KV of what stands in front of all chunks. The first call waits for the engine, which
        computes it between two steps."""
        if self._preamble is None:
            self._preamble = self._client.run_alone(lambda: self.encoder.preamble)
        return self._preamble

    def has_kv(self, chunks: Sequence[tuple[int, ...]]) -> bool:
        """Whether some tier has KV of one of these chunks."""
        return any(self.stored(chunks))

    def stored(self, chunks: Sequence[tuple[int, ...]]) -> list[bool]:
        """Of each chunk, whether some tier has KV of it."""
        encoder = self.encoder
        keys = [key(ids) for ids in chunks for key in (encoder.key, encoder.exact_key)]
        there = [peek.residency is not Residency.ABSENT for peek in self.store.peek(keys)]
        return [one or other for one, other in zip(there[::2], there[1::2], strict=True)]

    def saw(
        self,
        chunks: Sequence[tuple[int, ...]],
        at_once: Collection[ChunkId] = frozenset(),
        as_of: int | None = None,
        *,
        has_front: bool = False,
    ) -> None:
        """A request with these chunks was answered, see `ChunkPromotion.saw`."""
        if self._maker is not None and self.is_own:
            self._maker.asked([make_chunk_id(ids) for ids in chunks])
        if self._promotion is not None:
            self._promotion.saw(self.encoder, chunks, at_once, as_of, has_front=has_front)


class KVSource(Protocol):
    """Where a prompt's chunk KV is: a knowledge base, or the memory of documents."""

    def behind(self, key: PreambleKey) -> KVBehind:
        """The chunk KV behind a preamble. Makes no KV, waits for nothing. Any thread."""
        ...


class KVByPreamble:
    """A bounded number of `KVBehind`, made as requests come. Any thread."""

    def __init__(self, make: Callable[[PreambleKey], KVBehind], most: int = MOST_PREAMBLES) -> None:
        """`make` is quick: it computes nothing."""
        self._make = make
        self._most = most
        self._lock = threading.Lock()
        self._found: OrderedDict[PreambleKey, KVBehind] = OrderedDict()

    def get(self, key: PreambleKey) -> KVBehind:
        with self._lock:
            found = self._found.get(key)
            if found is None:
                found = self._found[key] = self._make(key)
                if len(self._found) > self._most:
                    self._found.popitem(last=False)
            self._found.move_to_end(key)
            return found
