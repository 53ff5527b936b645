"""Chunk KV behind one preamble, the preambles that requests come with, and what of both is stored.

Chunk KV belongs to the system prompt it was computed behind. Most requests share one, but a client
may send its own: what it asks about is then kept behind that one too, as far as it comes back.

A document handed over with a question was never ingested. The second time it is asked about, its KV
is computed once more, by itself, and stored under its content: from then on it is found in any
order and company. One copy per unique chunk, no matter which request brought it first; the store
keeps the books.

A chunk that stands in front of a prompt takes its isolated KV, which is exact there. That is stored
as well: with the others where a chunk came back, and at once where it has KV already.

What a strategy wants beside stored KV (`encode/extras.py`) is made when a request first asks for
it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvweave.app.library.kv_maker import KVMaker, WantedKV
from kvweave.app.library.runtime import EngineClient
from kvweave.calibrate.own_evidence import OwnEvidence
from kvweave.corpus.chunker import make_chunk_id
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.neighbour_encoder import NeighbourEncoder
from kvweave.fuse.protocol import Prefix
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.plan.ordering import AccessTable
from kvweave.types import Chunk, ChunkId

MOST_PREAMBLES = 16  # of one store: those that were not used for longest start anew
MOST_TOKENS = 512  # of a chunk: what requests bring may be of any length


class PreambleKey(NamedTuple):
    """Whose chunk KV, and what stands in front of it."""

    tenant: str  # "": of those without one
    preamble: tuple[int, ...]  # token ids


class ChunkPromotion:
    """Counts chunks and has those encoded that come back. Thread-safe; nothing here waits."""

    def __init__(self, max_context: int, threshold: int, maker: KVMaker) -> None:
        """`threshold`: requests that bring a chunk before its KV is stored, by `maker`."""
        self._max_context = max_context
        self._threshold = threshold
        self._maker = maker
        self._lock = threading.Lock()
        self._table = AccessTable()

    def saw(
        self,
        encoder: ChunkEncoder,
        chunks: Sequence[tuple[int, ...]],
        at_once: Collection[ChunkId] = frozenset(),
        as_of: int | None = None,
        *,
        has_front: bool = False,
    ) -> None:
        """A request with these chunks was answered, behind the preamble of `encoder`, by which they
        are counted. `at_once` are known to come back: the knowledge tree has them behind another
        path. `as_of` is when the chunks were found. `has_front`: the first of them stood right
        behind the preamble."""
        named = {make_chunk_id(ids): ids for ids in chunks}
        front = make_chunk_id(chunks[0]) if has_front and chunks else None
        context = encoder.context.context_id().hex()
        with self._lock:
            self._table.push([ChunkId(f"{context}|{chunk_id}") for chunk_id in named])
            counts = {c: self._table.count(ChunkId(f"{context}|{c}")) for c in named}
        for chunk_id, ids in named.items():
            in_front = chunk_id == front or not _has_context(encoder)
            returns = counts[chunk_id] >= self._threshold or chunk_id in at_once
            returns = returns or (chunk_id == front and _is_new_in_front(encoder, ids))
            if (returns or chunk_id == front) and self._fits(encoder, ids):
                chunk = Chunk(chunk_id, "", "", ids)
                self._maker.want(
                    WantedKV(encoder, chunk, as_of, in_front, is_only_taken=not returns)
                )

    def wait(self, timeout_s: float) -> bool:
        """Until nothing waits to be encoded. False: it takes longer."""
        return self._maker.wait(timeout_s)

    def _fits(self, encoder: ChunkEncoder, ids: tuple[int, ...]) -> bool:
        behind = len(encoder.preamble_ids)
        if encoder.preparation.variant.kind == "filler":
            behind += len(encoder.texts.filler)
        return len(ids) <= MOST_TOKENS and behind + len(ids) <= self._max_context


@dataclass(eq=False)
class KVBehind:
    """What a store has of chunks behind one preamble, and what makes more of it. Any thread."""

    encoder: ChunkEncoder
    _client: EngineClient
    _promotion: ChunkPromotion | None  # stores chunks that come back; None: nothing does
    _maker: KVMaker  # hears what was asked for
    evidence: OwnEvidence | None = None  # what fusing was found to cost on the documents
    neighbours: NeighbourEncoder | None = None  # encodes what stands behind some
    is_own: bool = False  # the preamble that documents are ingested behind
    _adding: threading.Lock = field(default_factory=threading.Lock)  # what two lack is made once
    _preamble: Prefix | None = None

    @property
    def store(self) -> KVStore:
        return self.encoder.store

    def preamble(self) -> Prefix:
        """The KV of what stands in front of all chunks. The first call waits for the engine, which
        computes it between two steps."""
        if self._preamble is None:
            self._preamble = self._client.run_alone(lambda: self.encoder.preamble)
        return self._preamble

    def add_extras(
        self, chunks: Sequence[tuple[int, ...]], names: Collection[str], as_of: int | None
    ) -> None:
        """Make these extras of those chunks of a prompt whose stored KV lacks some, and keep them
        beside it. Waits for the engine where there is something to make. `as_of` is when the
        chunks were found: nothing is kept of one that was deleted since."""
        parts = [Chunk(make_chunk_id(ids), "", "", ids) for ids in chunks]
        encoder, neighbours = self.encoder, self.neighbours
        keys = [key(ids) for ids in chunks for key in (encoder.key, encoder.exact_key)]
        with self._adding:
            try:
                made = encoder.add_extras(parts[:1], names, isolated=True)  # as `named_kv` takes it
                made += encoder.add_extras(parts[1:], names)
                if neighbours is not None:
                    made += neighbours.add_extras(parts[1:], names)
            except BaseException:  # some of them may have been made before it
                self._maker.check_replaced(encoder, parts, keys, as_of)
                raise
        if made:
            self._maker.check_replaced(encoder, parts, made, as_of)

    def has_kv(self, chunks: Sequence[tuple[int, ...]]) -> bool:
        """Whether some tier has KV of one of these chunks."""
        return any(self.are_stored(chunks))

    def are_stored(self, chunks: Sequence[tuple[int, ...]]) -> list[bool]:
        """Say of each chunk whether some tier has KV of it."""
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
        if self.is_own:
            self._maker.note_question([make_chunk_id(ids) for ids in chunks])
        if self._promotion is not None:
            self._promotion.saw(self.encoder, chunks, at_once, as_of, has_front=has_front)


class KVSource(Protocol):
    """Where a prompt's chunk KV is: a knowledge base, or the memory of documents."""

    def behind(self, key: PreambleKey) -> KVBehind:
        """The chunk KV behind a preamble. Makes no KV, waits for nothing. Any thread."""
        ...


class KVByPreamble:
    """A bounded number of `KVBehind`, made as requests come. Any thread."""

    def __init__(self, make: Callable[[PreambleKey], KVBehind]) -> None:
        """`make` is quick: it computes nothing."""
        self._make = make
        self._lock = threading.Lock()
        self._found: OrderedDict[PreambleKey, KVBehind] = OrderedDict()

    def get(self, key: PreambleKey) -> KVBehind:
        with self._lock:
            found = self._found.get(key)
            if found is None:
                found = self._found[key] = self._make(key)
                if len(self._found) > MOST_PREAMBLES:
                    self._found.popitem(last=False)
            self._found.move_to_end(key)
            return found


def _has_context(encoder: ChunkEncoder) -> bool:
    """Neighbours are the corpus's: what requests bring is isolated there, filler or not."""
    return encoder.preparation.variant.kind == "filler"


def _is_new_in_front(encoder: ChunkEncoder, ids: tuple[int, ...]) -> bool:
    """Whether a chunk is stored behind its encoding context and not isolated."""
    behind, isolated = encoder.store.peek([encoder.key(ids), encoder.exact_key(ids)])
    is_stored = behind.residency is not Residency.ABSENT
    return is_stored and isolated.residency is Residency.ABSENT
