"""Chunks that requests bring get their KV stored once they come back.

A document handed over with a question was never ingested. The second time it is asked about, its KV
is computed once more, by itself, and stored under its content: from then on it is found in any
order and company. One copy per unique chunk, no matter which request brought it first; the store
keeps the books.

A chunk that stands in front of a prompt takes its isolated KV, which is exact there. That is stored
as well: with the others where a chunk came back, and at once where it has KV already.
"""

import threading
from collections.abc import Collection, Sequence

from kvweave.app.library.kv_maker import KVMaker, WantedKV
from kvweave.corpus.chunker import make_chunk_id
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.kv.lookup import Residency
from kvweave.plan.ordering import AccessTable
from kvweave.types import Chunk, ChunkId

MOST_TOKENS = 512  # of a chunk: what requests bring may be of any length


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
            if not returns and not (chunk_id == front and _is_new_in_front(encoder, ids)):
                continue
            if self._fits(encoder, ids):
                chunk = Chunk(chunk_id, "", "", ids)
                self._maker.want(WantedKV(encoder, chunk, as_of, in_front))

    def wait(self, timeout_s: float) -> bool:
        """Until nothing waits to be encoded. False: it takes longer."""
        return self._maker.wait(timeout_s)

    def _fits(self, encoder: ChunkEncoder, ids: tuple[int, ...]) -> bool:
        behind = len(encoder.preamble_ids)
        if encoder.preparation.variant.kind == "filler":
            behind += len(encoder.texts.filler)
        return len(ids) <= MOST_TOKENS and behind + len(ids) <= self._max_context


def _has_context(encoder: ChunkEncoder) -> bool:
    """Neighbours are the corpus's: what requests bring is isolated there, filler or not."""
    return encoder.preparation.variant.kind == "filler"


def _is_new_in_front(encoder: ChunkEncoder, ids: tuple[int, ...]) -> bool:
    """Whether a chunk is stored behind its encoding context and not isolated."""
    behind, isolated = encoder.store.peek([encoder.key(ids), encoder.exact_key(ids)])
    is_stored = behind.residency is not Residency.ABSENT
    return is_stored and isolated.residency is Residency.ABSENT
