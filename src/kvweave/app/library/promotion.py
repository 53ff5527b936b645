"""Chunks that requests bring get their KV stored once they come back.

A document handed over with a question was never ingested. The second time it is asked about, its KV
is computed once more, by itself, and stored under its content: from then on it is found in any
order and company. One copy per unique chunk, no matter which request brought it first; the store
keeps the books.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvweave.app.runtime import ActiveAnswers
from kvweave.corpus.chunker import make_chunk_id
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.plan.ordering import AccessTable
from kvweave.types import Chunk, ChunkId

log = logging.getLogger(__name__)

QUIET_S = 5.0  # without an answer: who asks the next question at once should not wait for a chunk
LOOK_S = 0.2  # how often one who waits looks whether it is to end
ALONE_WAIT_S = 30.0  # encoding waits so long for that
CLOSE_WAIT_S = 10.0  # more than a chunk takes
MOST_TOKENS = 512  # of a chunk: while one is encoded no answer goes on
MAX_WAITING = 64  # chunks to be encoded; more are left for the next time they are seen
IsGone = Callable[[ChunkId, int], bool]  # whether a chunk found then was deleted since


class ChunkPromotion:
    """Counts chunks and has those encoded that come back. Thread-safe; nothing here waits.

    Encoding runs on a thread of its own, chunk by chunk, each when no answer is in the making or
    none has ended for long: no answer waits for more than one chunk.
    """

    def __init__(
        self, max_context: int, answers: ActiveAnswers, threshold: int, is_gone: IsGone
    ) -> None:
        """Waits a while for a moment without `answers` before it encodes. `threshold`: requests
        that bring a chunk before its KV is stored. `is_gone`: of a chunk that was found some time
        ago, whether it was deleted since; then it is not stored."""
        self._max_context = max_context
        self._answers = answers
        self._threshold = threshold
        self._is_gone = is_gone
        self._lock = threading.Lock()
        self._table = AccessTable()
        self._waiting: set[ChunkId] = set()  # by `_name`
        self._queue: queue.SimpleQueue[PromotedChunk | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._idle = threading.Condition(self._lock)

    def saw(
        self,
        encoder: ChunkEncoder,
        chunks: Sequence[tuple[int, ...]],
        at_once: Collection[ChunkId] = frozenset(),
        as_of: int | None = None,
    ) -> None:
        """A request with these chunks was answered, behind the preamble of `encoder`, by which they
        are counted. `at_once` are known to come back: the knowledge tree has them behind another
        path. `as_of` is when the chunks were found."""
        named = {make_chunk_id(ids): ids for ids in chunks}
        with self._lock:
            if self._closed:
                return
            self._table.push([_name(encoder, chunk_id) for chunk_id in named])
            for chunk_id, ids in named.items():
                name = _name(encoder, chunk_id)
                often = self._table.count(name) >= self._threshold
                if (often or chunk_id in at_once) and self._has_room(encoder, name, ids):
                    self._waiting.add(name)
                    self._queue.put(PromotedChunk(encoder, Chunk(chunk_id, "", "", ids), as_of))
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="promotion", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Until nothing waits to be encoded. False: it takes longer."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._waiting, timeout_s)

    def close(self) -> None:
        """Encode no more. A chunk under way is finished first; one that still waits for its moment
        finds the door shut."""
        with self._lock:
            self._closed = True
            thread = self._thread
        with suppress(queue.Empty):  # its thread takes from it, too
            while True:
                self._queue.get_nowait()
        self._queue.put(None)
        if thread is not None:
            thread.join(CLOSE_WAIT_S)

    def _has_room(self, encoder: ChunkEncoder, name: ChunkId, ids: tuple[int, ...]) -> bool:
        """Lock is held."""
        behind = len(encoder.preamble_ids)
        if _has_filler(encoder):
            behind += len(encoder.texts.filler)
        fits = len(ids) <= MOST_TOKENS and behind + len(ids) <= self._max_context
        return fits and name not in self._waiting and len(self._waiting) < MAX_WAITING

    def _encode(self, encoder: ChunkEncoder, chunk: Chunk, as_of: int | None) -> None:
        if self._closed or self._was_deleted(chunk, as_of):
            return
        encoder.encode([chunk])
        if as_of is not None:
            encoder.store.flush()  # a deletion from now on finds it where it lies
        if self._was_deleted(chunk, as_of):  # meanwhile, before there was anything to delete
            encoder.store.delete([encoder.exact_key(chunk.token_ids), encoder.key(chunk.token_ids)])

    def _wait_for_quiet(self) -> None:
        """Until nobody has asked for a while, or long enough; or at once, if it is to end."""
        give_up_s = time.monotonic() + ALONE_WAIT_S
        while not self._closed and time.monotonic() < give_up_s:
            if self._answers.wait_for_quiet(QUIET_S, LOOK_S):
                return

    def _was_deleted(self, chunk: Chunk, as_of: int | None) -> bool:
        return as_of is not None and self._is_gone(chunk.id, as_of)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            encoder, chunk, as_of = item
            try:
                if _is_absent(encoder, chunk):
                    self._wait_for_quiet()
                    self._encode(encoder, chunk, as_of)
            except Exception:  # what the device raises: answers go on, and it must be seen
                log.exception("the KV of chunk %s, which requests brought, is not stored", chunk.id)
            finally:
                with self._idle:
                    self._waiting.discard(_name(encoder, chunk.id))
                    self._idle.notify_all()


class PromotedChunk(NamedTuple):
    """A chunk that is to be encoded."""

    encoder: ChunkEncoder
    chunk: Chunk
    as_of: int | None


def _name(encoder: ChunkEncoder, chunk_id: ChunkId) -> ChunkId:
    """A chunk behind one preamble: behind another it is another one."""
    return ChunkId(f"{encoder.context.context_id().hex()}|{chunk_id}")


def _has_filler(encoder: ChunkEncoder) -> bool:
    """Neighbours are the corpus's: what requests bring is isolated there, filler or not."""
    return encoder.preparation.variant.kind == "filler"


def _is_absent(encoder: ChunkEncoder, chunk: Chunk) -> bool:
    if encoder.absent([chunk], encoder.exact_key):
        return True
    return _has_filler(encoder) and bool(encoder.absent([chunk], encoder.key))
