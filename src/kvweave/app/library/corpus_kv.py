"""Which chunks of a knowledge base have KV and which have none yet: by the catalogue, which says
what there is, and the store, which says what it holds. Nothing of it is kept, so it cannot be wrong
after a kill.

Most asked for first, then newest first: who has just brought a document will ask about it.
"""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from kvweave.app.library.chunk_demand import DEMAND_FILE
from kvweave.app.library.front_kv import FrontKV
from kvweave.app.library.kv_progress import KVProgress, KVState
from kvweave.app.library.library_kv import BackgroundKV, LibraryKV
from kvweave.app.library.neighbours import NeighbourKeeper
from kvweave.app.library.stored_kv import KV_FOLDER, StoredKV
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import KVWeaveError
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder, Pace
from kvweave.ingest.report import reason_of
from kvweave.kv.lookup import Residency
from kvweave.kv.provenance import find_tagged
from kvweave.types import Chunk, ChunkId

log = logging.getLogger(__name__)

BATCH = 256  # chunks looked at together
RATE_OF = 32  # chunks that the time left is estimated from
RETRY_S = 15.0  # until one of those that no tier took is tried again; twice as long each time
LONGEST_RETRY_S = 600.0
# Of the bytes of the chunks' own KV: until copies take so much, some are made ahead. Of 126 chunks,
# asked about in orders never seen, a third finds as many first chunks as all found would (29 of 36)
FRONT_SHARE = 1 / 3


class CorpusKV:
    """Says which chunks of one base lack KV. `progress` and `nothing_left` on any thread, all else
    on the maker's."""

    def __init__(self, kb: KnowledgeBase, kv: LibraryKV, options: BackgroundKV) -> None:
        self._kb = kb
        self._kv = kv
        self._most_bytes = options.most_bytes
        self._bound = options.bound
        self.fronts = FrontKV(kb, kv.encoder, self._front_room)
        self._is_unused = False  # what would be made
        self._judged: tuple[int, bool] | None = None  # the evidence by which that was judged
        self._cold: deque[ChunkId] = deque()  # that `warm_next` has not looked at, hottest first
        self._lock = threading.Lock()  # guards the rest
        self._generation = -1  # of the catalogue, as it was looked at
        self._last = 0  # the highest vector id that was
        self._sizes: dict[ChunkId, int] = {}  # of those with KV
        self._missing: dict[ChunkId, int] = {}  # tokens of those without, oldest first
        self._computed: dict[ChunkId, int] = {}  # bytes of those on their way to a tier
        self._left: set[ChunkId] = set()  # of those without, what could not be made
        self._unkept: set[ChunkId] = set()  # of those left, what was made and no tier took
        self._retry_s = 0.0  # when those are tried again
        self._num_retries = 0  # since something was kept
        self._why = ""
        self._is_full = False
        self._pieces: deque[tuple[float, int]] = deque(maxlen=RATE_OF)  # when made, its tokens

    # ---- any thread

    @property
    def encoder(self) -> ChunkEncoder:
        return self._kv.encoder

    @property
    def demand_path(self) -> Path:
        """Where it is kept which chunks questions find."""
        return self._kb.folder / KV_FOLDER / DEMAND_FILE

    def progress(self) -> KVProgress:
        total = self._kb.catalogue.num_chunks()  # some may have come since the last look
        local = list(self._kv.store.used_bytes().values())  # fastest first: the disk is the last
        num_bytes = local[-1] if local else 0
        with self._lock:
            done, missing = len(self._sizes), len(self._missing)
            total = max(total, done)
            state: KVState = "making"
            if self._is_unused:
                state = "unused"
            elif self._generation < 0 and self._why:
                state = "failed"
            elif self._is_full:
                state = "full"
            elif missing == len(self._left) and total <= done + missing:
                state = "failed" if self._why else "ready"
            eta_s = self._eta_s() if state == "making" else None
            num_fronts = self.fronts.num_done()
            return KVProgress(state, done, total, num_bytes, eta_s, self._why, num_fronts)

    def nothing_left(self) -> bool:
        """Whether there is nothing that could be made now, by the last look."""
        with self._lock:
            is_seen = self._generation >= 0 or bool(self._why)
            return is_seen and (self._is_full or len(self._missing) == len(self._left))

    def _eta_s(self) -> float | None:
        if len(self._pieces) < 2:
            return None
        (first_s, first), (last_s, _) = self._pieces[0], self._pieces[-1]
        made = sum(tokens for _, tokens in self._pieces) - first
        return (last_s - first_s) / max(1, made) * sum(self._missing.values())

    # ---- the maker's thread

    def prepare(self) -> bool:
        """Whether KV can be made here at all, and would be used; `progress` says why not. That it
        is unused is for good, all else may be asked again. Deletes what a maker that was killed may
        have left of chunks that went meanwhile."""
        try:
            self._sweep()
            self._judge_use()
            if self._is_unused:
                return False
            self._kv.prepare_to_encode()
        except (KVWeaveError, sqlite3.Error, OSError) as error:
            why = reason_of(error)  # an OSError's own words name files
            if why != self._why:
                log.warning("%s: no chunk KV is made in the background: %s", self._kb.folder, error)
            with self._lock:
                self._why = why
            return False
        with self._lock:
            self._why = ""
        return True

    @property
    def is_unused(self) -> bool:
        return self._is_unused

    def _judge_use(self) -> None:
        """Look whether what would be made is used; once it is not, that is for good. Again after
        every table that the documents themselves gave."""
        evidence = self._kv.worth.evidence
        judged = evidence.look, evidence.is_asked
        if self._bound is None or self._judged == judged:
            return
        self._judged = judged
        why = self._kv.worth.why_unused(self._bound)
        if why is not None:
            log.info("%s: no chunk KV is made in the background: %s", self._kb.folder, why)
            with self._lock:
                self._why, self._is_unused = why, True

    def _sweep(self) -> None:
        """A maker looks whether a chunk is still there after its KV is written, and deletes the KV
        if not. One that was killed in between is made good here. (What it may have sent to a shared
        tier in that moment is left to that tier's own eviction.)"""
        gone = self._kb.catalogue.removals.chunk_ids()
        if not gone:
            return
        store = self._kv.store
        tiers = [slot.tier for slot in store.inventory.below if not slot.tier.remote]
        keys = [key for tier in tiers for key in find_tagged(tier, gone)]
        if keys:
            log.warning("%d chunk KV of removed documents were left over: deleted", len(keys))
            store.delete(keys)

    def look(self) -> None:
        """Take in what came and went. Quick if nothing did."""
        self._judge_use()
        catalogue = self._kb.catalogue
        generation = catalogue.generation()
        if generation == self._generation:
            self._try_again()
            return
        if self._is_behind_neighbours:  # what saw a chunk that went has lost its KV
            with self._lock:
                self._sizes, self._missing, self._last = {}, {}, 0
        while rows := catalogue.chunks_after(self._last, BATCH):
            self._take_in([chunk for _, chunk in rows])
            self._last = rows[-1][0]
        alive = set(catalogue.chunk_ids())
        with self._lock:
            for known in (self._sizes, self._missing):
                for chunk_id in known.keys() - alive:
                    del known[chunk_id]
            self._left, self._unkept = set(), set()  # another try
            self._is_full = False
            self._why = ""
            self._generation = generation
        self.fronts.keep(alive)

    def _try_again(self) -> None:
        """A tier that took nothing may be well again, and nobody tells: one chunk finds out. The
        others wait for it, so that a broken disk does not have all of them computed in vain."""
        with self._lock:
            if self._unkept and time.monotonic() >= self._retry_s:
                self._left.discard(self._unkept.pop())
                self._num_retries += 1
                self._put_off()

    def _put_off(self) -> None:
        """Lock is held."""
        wait_s = min(RETRY_S * 2**self._num_retries, LONGEST_RETRY_S)
        self._retry_s = time.monotonic() + wait_s

    def _take_in(self, chunks: Sequence[Chunk]) -> None:
        encoder = self._kv.encoder
        peeks = self._kv.store.peek([encoder.key(chunk.token_ids) for chunk in chunks])
        there = []
        with self._lock:
            for chunk, peek in zip(chunks, peeks, strict=True):
                if peek.residency is Residency.ABSENT:
                    self._missing[chunk.id] = len(chunk.token_ids)
                else:
                    size = peek.size_bytes or encoder.plain_bytes(len(chunk.token_ids))
                    self._sizes[chunk.id] = size
                    there.append(chunk)
        self.fronts.add(there)

    def next_run(self, asked: Sequence[ChunkId]) -> list[Chunk]:
        """The chunks whose KV should be made next, in one pass of the decoder; none if there are
        none or no room for one. `asked`: chunks that questions found, most often first."""
        most_rows = self._kv.encoder.pass_rows
        run: list[Chunk] = []
        num_rows = 0
        while chunk := self._next(asked, run):
            num_rows += len(chunk.token_ids)
            if run and num_rows > most_rows:
                break
            run.append(chunk)
            if self._is_one_at_a_time:
                break
        return run

    @property
    def _is_one_at_a_time(self) -> bool:
        """A pass over several chunks is no faster on a CPU; each has neighbours of its own."""
        return self._kv.encoder.decoder.device.type == "cpu" or self._is_behind_neighbours

    def _next(self, asked: Sequence[ChunkId], run: Sequence[Chunk]) -> Chunk | None:
        """The chunk whose turn it is behind a run of others; None if there is none or no room."""
        may_give_way = True
        while not self._is_unused:
            with self._lock:
                wanted = (c for c in asked if c in self._missing)
                newest = reversed(self._missing)
                passed = self._left | self._computed.keys() | {chunk.id for chunk in run}
                chunk_id = next((c for c in chain(wanted, newest) if c not in passed), None)
                if chunk_id is None:
                    return None
                num_tokens = self._missing[chunk_id]
            taken = [len(chunk.token_ids) for chunk in run]
            missing_bytes = self._missing_bytes(num_tokens, *taken)
            if missing_bytes > 0 and may_give_way and self.fronts.give_way(missing_bytes):
                may_give_way = False
                continue
            if missing_bytes > 0:
                with self._lock:
                    self._is_full = not run
                return None
            with self._lock:
                self._is_full = False
            chunk = self._kb.catalogue.chunks([chunk_id]).get(chunk_id)
            if chunk is not None:
                return chunk
            with self._lock:  # it went since the last look
                self._missing.pop(chunk_id, None)
        return None

    def _missing_bytes(self, *num_tokens: int) -> int:
        """By how much the KV of these chunks is too large for the room there is; at most 0 if it
        fits."""
        size = sum(map(self._kv.encoder.plain_bytes, num_tokens))
        if self._is_behind_neighbours:
            size *= 2  # with what it brings where it is a neighbour
        with self._lock:
            size += sum(self._computed.values())
        rooms = [self._kv.store.room_bytes(), self._own_room()]
        return max((size - room for room in rooms if room is not None), default=0)

    def _own_room(self) -> int | None:
        """What is left of `most_bytes`."""
        if self._most_bytes is None:
            return None
        with self._lock:
            return self._most_bytes - sum(self._sizes.values()) - self.fronts.num_bytes()

    def _front_room(self) -> int:
        """What front copies that are made ahead may still take: all copies together FRONT_SHARE of
        the chunks' own KV, and as much room as that takes is left for more of it. None in a tier
        that others share: theirs would be made, and give way, by everybody."""
        if any(slot.tier.remote for slot in self._kv.store.inventory.slots):
            return 0
        with self._lock:
            own = sum(self._sizes.values())
        rooms = [self._kv.store.room_bytes(), self._own_room()]
        left = int(FRONT_SHARE * own) - self.fronts.num_bytes()
        return min([left, *(room - own for room in rooms if room is not None)])

    def has_chunk(self, chunk_id: ChunkId) -> bool:
        """Whether a chunk was there at the last look."""
        with self._lock:
            return chunk_id in self._sizes or chunk_id in self._missing

    def plan_warming(self, asked: Sequence[ChunkId]) -> None:
        """Note what should come to host memory while nothing else is to be done: `asked` first."""
        self._cold = deque(dict.fromkeys([*asked, *self._kb.catalogue.chunk_ids()]))

    @property
    def is_cold(self) -> bool:
        """Whether something is left for `warm_next`."""
        return bool(self._cold)

    def warm_next(self) -> bool:
        """Bring the next chunk's KV to host memory, unless it is there. False: all that fits is."""
        while self._cold:
            chunk_id = self._cold.popleft()
            chunk = self._kb.catalogue.chunks([chunk_id]).get(chunk_id)
            if chunk is None:
                continue
            encoder, ids = self._kv.encoder, chunk.token_ids
            keys = dict.fromkeys((encoder.key(ids), encoder.exact_key(ids)))
            warmed = self._kv.store.warm(list(keys))
            if warmed is None:
                self._cold.clear()
            elif warmed:
                return True
        return False

    def make(self, run: Sequence[Chunk], pace: Pace) -> None:
        """Compute and save the KV of a run of chunks, behind their encoding context. Raises what
        the device does and what `pace` does; KVWeaveError where another process is writing."""
        if not self._is_behind_neighbours:
            self._kv.encoder.encode(run, pace=pace)
            return
        with self._kb.writing_briefly():  # what it sees must not go meanwhile
            self._kv.sync().before()
            table = self._kv.table
            assert table is not None, "an encoder behind neighbours has a table of them"
            kept = StoredKV(self._kb.folder, self._kv.store)
            chunk_ids = [chunk.id for chunk in run]
            NeighbourKeeper(self._kb, table, self._kv.encoder, kept).give(None, chunk_ids)
            self.flush()  # a removal by another process finds it, and whom it saw

    def flush(self) -> None:
        """Wait for what was saved to lie where a removal would find it."""
        self._kv.store.flush()

    def was_deleted(self, chunk: Chunk) -> bool:
        """Whether a chunk is no more. Asked when its KV lies where a removal would find it."""
        return not self._kb.catalogue.existing([chunk.id])

    def note_computed(self, chunk: Chunk) -> None:
        """Note that a chunk's KV was computed; it is not chosen again before it is known to be
        kept."""
        with self._lock:
            self._computed[chunk.id] = self._kv.encoder.plain_bytes(len(chunk.token_ids))

    def note_made(self, chunk: Chunk) -> None:
        """Note what became of a chunk's KV that was computed, and whose writes are done."""
        encoder = self._kv.encoder
        (peek,) = self._kv.store.peek([encoder.key(chunk.token_ids)])
        with self._lock:
            self._computed.pop(chunk.id, None)
            tokens = self._missing.pop(chunk.id, len(chunk.token_ids))
            self._pieces.append((time.monotonic(), tokens))
            if peek.residency is Residency.ABSENT:
                self._missing[chunk.id] = tokens
                self._leave(chunk.id, "it could not be kept")
                self._unkept.add(chunk.id)
                self._put_off()
            else:
                self._left -= self._unkept
                self._unkept, self._num_retries = set(), 0
                if not self._left:
                    self._why = ""
                self._sizes[chunk.id] = peek.size_bytes or encoder.plain_bytes(tokens)
        if peek.residency is not Residency.ABSENT:
            self.fronts.add([chunk])

    def leave_out(self, chunk: Chunk, error: Exception) -> None:
        """Leave a chunk out until documents change: its KV could not be computed."""
        with self._lock:
            self._computed.pop(chunk.id, None)
            self._leave(chunk.id, reason_of(error))

    def forget(self, chunk: Chunk) -> None:
        """It is no more: nor is its KV, from now on."""
        encoder, ids = self._kv.encoder, chunk.token_ids
        self._kv.store.delete([encoder.key(ids), encoder.exact_key(ids)])
        with self._lock:
            for known in (self._missing, self._sizes, self._computed):
                known.pop(chunk.id, None)
        self.fronts.forget(chunk.id)

    def _leave(self, chunk_id: ChunkId, why: str) -> None:
        """Lock is held."""
        self._left.add(chunk_id)
        self._why = f"chunk {chunk_id[:8]}: {why}"

    @property
    def is_idle_only(self) -> bool:
        """Behind neighbours a piece of work is long: several chunks may have to be computed."""
        return self._is_behind_neighbours

    @property
    def _is_behind_neighbours(self) -> bool:
        return self._kv.encoder.preparation.variant.kind == "neighbours"
