"""Makes chunk KV in the background: one thread for all that a knowledge base, or the memory of
documents, wants stored.

    1  what requests brought again, and what stood in front for the first time   (`kv_behind.py`)
    2  at the start, in idle time: KV on a disk comes to host memory, most asked for first
    3  chunks of the knowledge base without KV, most asked for first             (`corpus_kv.py`)
    4  front copies of chunks that questions found, a bounded share of them       (`front_kv.py`)

What a prompt has just computed right behind the preamble is not computed again: it is copied from
the knowledge tree. All else is one chunk at a time, on a GPU one pass of several, a few layers at a
time, when the engine may be had (`engine/background.py`): an answer that comes meanwhile waits for
a slice, never for a chunk.

A chunk may be deleted while its KV is in the making. So its KV is written first, and then it is
looked whether the chunk is still there: a deletion before that look is seen by it, a deletion after
it finds the KV where it lies. No lock of the knowledge base is held meanwhile. A few chunks are
written and looked after together where a device computes: it does the next ones meanwhile.
"""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from kvweave.app.library.chunk_demand import ChunkDemand
from kvweave.app.library.corpus_kv import CorpusKV
from kvweave.app.library.kv_progress import KVProgress
from kvweave.engine.background import SLICE_S, BackgroundPace, GaveUp
from kvweave.engine.request import EngineChunk
from kvweave.errors import CorpusError, EngineClosed, KVWeaveError
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder, Pace
from kvweave.fuse.protocol import Prefix
from kvweave.kv.format.keys import ChunkKey
from kvweave.types import Chunk, ChunkId

log = logging.getLogger(__name__)

CLOSE_WAIT_S = 10.0  # more than a slice and a flush take
PREPARE_S = 30.0  # until it is tried again to begin, where a tier was broken at the start
LOOK_S = 2.0  # how often it looks whether another process has brought documents
HURRY_S = 1800.0  # a hurry lasts so long at most: others are served as well
MOST_UNCHECKED = 32  # chunks whose KV is on its way to a disk while the next are computed
MAX_WAITING = 64  # chunks that requests want stored; more are left for the next time they are seen
# Whether a chunk that was found then has been deleted since, for a tenant
WasDeleted = Callable[[ChunkId, int, str], bool]
# Copies the exact KV of a preamble with a chunk behind it, of a tenant; None: no prompt has left it
ReadExact = Callable[[Sequence[int], EngineChunk, str], Prefix | None]


class WantedKV(NamedTuple):
    """A chunk whose KV some request would have found useful."""

    encoder: ChunkEncoder
    chunk: Chunk
    as_of: int | None  # when it was found; None: it cannot be deleted
    in_front: bool  # isolated, as it is taken right behind the preamble
    is_only_taken: bool = False  # not computed for that, and only if the knowledge base has it

    @property
    def name(self) -> str:
        """A chunk behind one preamble: behind another it is another one. One that may be computed
        does not make way for the same one that may only be taken."""
        context = self.encoder.context.context_id().hex()
        return f"{context}|{self.chunk.id}|{self.in_front}|{self.is_only_taken}"

    def is_absent(self) -> bool:
        encoder = self.encoder
        return bool(
            encoder.absent([self.chunk], encoder.exact_key if self.in_front else encoder.key)
        )

    def encode(self, pace: Pace) -> None:
        if self.in_front:
            self.encoder.encode_isolated([self.chunk], pace)
        else:
            self.encoder.encode([self.chunk], pace=pace)


class KVMaker:
    """Makes chunk KV on a thread of its own. Any thread; nothing here waits but `wait` and
    `close`."""

    def __init__(
        self,
        pace: BackgroundPace,
        was_deleted: WasDeleted,
        read_exact: ReadExact,
        corpus: CorpusKV | None = None,
    ) -> None:
        """`was_deleted`: of a chunk that was found some time ago, whether it was deleted since: it
        is not stored then. `corpus` None: only what requests want is made."""
        self._pace = pace
        self._is_deleted = was_deleted
        self._read_exact = read_exact
        self._corpus = corpus
        self._closing = threading.Event()
        self._changed = threading.Condition()  # guards the rest
        self._wanted: deque[WantedKV] = deque()
        self._names: set[str] = set()  # of those, and of the one in the making
        self._is_making = False
        self._demand = ChunkDemand(None if corpus is None else corpus.demand_path)
        self._preferred: tuple[ChunkId, ...] = ()  # before what questions find
        # of the thread alone: what was made and not looked after yet, and who notes that it is kept
        self._unchecked: list[tuple[Chunk, Callable[[Chunk], None]]] = []
        self.is_hurried = False  # what is missing is made beside answers, half of the time
        self._hurried_until_s = self._next_slice_s = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin with what the knowledge base lacks."""
        if self._corpus is not None:
            with self._changed:
                self._begin()

    def want(self, wanted: WantedKV) -> bool:
        """Have a chunk's KV stored. False: it is under way, or too many are."""
        with self._changed:
            is_new = wanted.name not in self._names and len(self._names) < MAX_WAITING
            if is_new and not self._closing.is_set():
                self._names.add(wanted.name)
                self._wanted.append(wanted)
                self._begin()
                self._changed.notify_all()
            return is_new

    def note_question(self, chunk_ids: Collection[ChunkId]) -> None:
        """Note what a question found: what it lacks of these comes first."""
        if self._corpus is None or not chunk_ids:
            return
        self._demand.push(chunk_ids)
        self.look()

    def check_replaced(
        self,
        encoder: ChunkEncoder,
        chunks: Sequence[Chunk],
        keys: Collection[ChunkKey],
        as_of: int | None,
    ) -> None:
        """Look after KV of these chunks that was just encoded again, under `keys`: what was deleted
        meanwhile goes, as the module says. Waits until it is written."""
        encoder.store.flush()
        tenant = encoder.context.tenant_salt
        kept: set[ChunkKey] = set()
        for chunk in chunks:
            if as_of is None or not self._is_deleted(chunk.id, as_of, tenant):
                kept |= {encoder.key(chunk.token_ids), encoder.exact_key(chunk.token_ids)}
        encoder.store.delete(set(keys) - kept)  # of a neighbour that went, too

    def prefer(self, chunk_ids: Sequence[ChunkId]) -> None:
        """Make the KV of these chunks of the knowledge base before that of all others."""
        self._preferred = tuple(chunk_ids)
        self.look()

    def look(self) -> None:
        """Documents came or went."""
        with self._changed:
            self._changed.notify_all()

    def hurry(self) -> None:
        """Make what the knowledge base lacks beside answers, with half of the time, until nothing
        is left or HURRY_S are over."""
        self._hurried_until_s = time.monotonic() + HURRY_S
        self.is_hurried = True
        self.look()

    def progress(self) -> KVProgress | None:
        """How far the knowledge base is; None: its KV is not made in the background."""
        return None if self._corpus is None else self._corpus.progress()

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is left to be made, by the last look. False: it takes longer."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self) -> None:
        """Make no more. What is under way is given up at its next slice."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_WAIT_S)

    # ---- the thread

    def _begin(self) -> None:
        """Lock is held."""
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._work, name="chunk-kv", daemon=True)
            self._thread.start()

    def _is_idle(self) -> bool:
        """Lock is held."""
        is_done = not (self._names or self._is_making or self._unchecked)
        corpus = self._corpus
        if not is_done or corpus is None:
            return is_done
        if not corpus.nothing_left():
            return False
        return corpus.is_unused or corpus.fronts.nothing_left(self._demand.rank())

    def _work(self) -> None:
        corpus: CorpusKV | None = None  # as soon as it is prepared
        prepare_s = 0.0  # when that is tried
        while not self._closing.is_set():
            if corpus is None and self._may_prepare() and time.monotonic() >= prepare_s:
                assert self._corpus is not None, "there is one to prepare"
                corpus = self._corpus if self._corpus.prepare() else None
                if corpus is not None:
                    corpus.plan_warming(self._demand.rank())
                prepare_s = time.monotonic() + PREPARE_S
            try:
                did_something = self._make_one(corpus)
            except (GaveUp, EngineClosed):
                break
            if corpus is not None and not did_something:
                self._demand.keep(corpus.has_chunk)
            if not did_something:
                self._rest(corpus)
        if corpus is not None:
            self._check_made(corpus)
            self._demand.keep(corpus.has_chunk)

    def _make_one(self, corpus: CorpusKV | None) -> bool:
        """Make the KV whose turn it is. False: there is none, or it is tried again."""
        try:
            if self._make_wanted():
                return True
            if corpus is None:
                return False
            may_warm = corpus.is_cold and self._pace.is_quiet()
            return (
                (may_warm and corpus.warm_next())
                or self._make_next(corpus)
                or self._make_front(corpus)
                or self._check_made(corpus)
            )
        except (GaveUp, EngineClosed):
            raise
        except (KVWeaveError, sqlite3.Error, OSError) as error:
            log.warning("chunk KV in the background: %s; tried again", error)
            return False

    def _rest(self, corpus: CorpusKV | None) -> None:
        """Wait until something is wanted, or a moment where documents may come."""
        if corpus is not None and corpus.nothing_left():
            self.is_hurried = False
        with self._changed:
            self._changed.notify_all()
            if not self._wanted and not self._closing.is_set():
                is_over = corpus is None and not self._may_prepare()
                self._changed.wait(None if is_over else LOOK_S)

    def _may_prepare(self) -> bool:
        """Whether there is KV to be made for a knowledge base, now or once a tier is well again."""
        return self._corpus is not None and not self._corpus.is_unused

    def _make_wanted(self) -> bool:
        """Make what some request wants. False: there is nothing."""
        with self._changed:
            if not self._wanted:
                return False
            wanted = self._wanted.popleft()
        try:
            words = "the KV of chunk %s, which requests brought, is not stored"
            self._try(wanted.encoder, wanted.chunk, words, lambda: self._make(wanted))
        finally:
            with self._changed:
                self._names.discard(wanted.name)
                self._changed.notify_all()
        return True

    def _try(
        self, encoder: ChunkEncoder, chunk: Chunk, words: str, work: Callable[[], None]
    ) -> Exception | None:
        """Run what makes the KV of a chunk. Returns what the device raised, logged and counted
        unless there are no `words`: answers go on. Raises GaveUp, EngineClosed."""
        with self._changed:
            self._is_making = True
        try:
            work()
        except (GaveUp, EngineClosed):
            raise
        except Exception as error:
            if not words:
                return error
            log.exception(words, chunk.id)
            encoder.store.metrics.count("kv_not_made_total", reason=type(error).__name__)
            return error
        finally:
            with self._changed:
                self._is_making = False
                self._changed.notify_all()
        return None

    def _make(self, wanted: WantedKV) -> None:
        encoder, chunk = wanted.encoder, wanted.chunk
        if not wanted.is_absent() or self._was_deleted(wanted):
            return
        if not self._take_exact(wanted):
            if wanted.is_only_taken:
                return
            with self._pace.turn(self._closing) as turn:
                turn.wait()
                if self._was_deleted(wanted):
                    return
                wanted.encode(turn)
        if wanted.as_of is not None:
            encoder.store.flush()  # a deletion from now on finds it where it lies
        if self._was_deleted(wanted):  # meanwhile, before there was anything to delete
            ids = chunk.token_ids
            encoder.store.delete([encoder.exact_key(ids), encoder.key(ids)])
        elif self._corpus is not None and encoder is self._corpus.encoder and wanted.in_front:
            self._corpus.fronts.add([chunk])  # so that it gives way like the others

    def _take_exact(self, wanted: WantedKV) -> bool:
        """Take the KV of a chunk in front from a prompt that has computed it. False: there is
        none, or it would not be good enough."""
        encoder, chunk = wanted.encoder, wanted.chunk
        if not wanted.in_front or not encoder.can_take_exact:
            return False
        is_foreign = self._corpus is None or self._corpus.was_deleted(chunk)
        if wanted.is_only_taken and is_foreign:
            return False
        tenant, named = encoder.context.tenant_salt, EngineChunk(chunk.id, chunk.token_ids)
        path = self._read_exact(encoder.preamble_ids, named, tenant)
        if path is not None:
            encoder.take_exact(chunk, path)
        return path is not None

    def _was_deleted(self, wanted: WantedKV) -> bool:
        tenant, as_of = wanted.encoder.context.tenant_salt, wanted.as_of
        return as_of is not None and self._is_deleted(wanted.chunk.id, as_of, tenant)

    def _make_next(self, corpus: CorpusKV) -> bool:
        """Make the chunks of the knowledge base whose turn it is, in one pass. False: there are
        none, or another process writes."""
        corpus.look()  # whether it is used, too
        run = corpus.next_run([*self._preferred, *self._demand.rank()])
        if not run:
            return False
        error = self._make_run(corpus, run)
        if error is not None and len(run) > 1:  # one that cannot be made leaves the others alone
            for chunk in run:
                error = self._make_run(corpus, [chunk])
        if self._has_enough(corpus) or error is not None:
            self._check_made(corpus)
        return not isinstance(error, CorpusError)

    def _make_run(self, corpus: CorpusKV, run: Sequence[Chunk]) -> Exception | None:
        """Make the KV of some chunks in one pass; a single one that fails is left out. Returns what
        was raised; a CorpusError says that another process writes, and leaves nothing out."""
        busy: list[CorpusError] = []

        def work() -> None:
            idle_only = corpus.is_idle_only
            try:
                with self._pace.turn(self._closing, idle_only, self._wants_hurry) as turn:
                    if not idle_only:
                        turn.wait()
                    corpus.make(run, turn)
            except CorpusError as error:
                busy.append(error)
                return
            for chunk in run:
                corpus.note_computed(chunk)
                self._unchecked.append((chunk, corpus.note_made))

        # of several nothing is said: each is tried alone next
        words = "the KV of chunk %s is not stored" if len(run) == 1 else ""
        error = self._try(corpus.encoder, run[0], words, work)
        if error is not None and len(run) == 1:
            self._unchecked.append((run[0], partial(corpus.leave_out, error=error)))
        return error or next(iter(busy), None)

    def _wants_hurry(self) -> bool:
        """Whether the next slice is taken beside answers. Half of the time is left to them."""
        if time.monotonic() >= self._hurried_until_s:
            self.is_hurried = False
        if not self.is_hurried:
            return False
        is_free = time.monotonic() >= self._next_slice_s
        if is_free:
            self._next_slice_s = time.monotonic() + 2 * SLICE_S
        return is_free

    def _make_front(self, corpus: CorpusKV) -> bool:
        """Make the front copy whose turn it is. False: there is none."""
        chunk = corpus.fronts.next(self._demand.rank())
        if chunk is None:
            return False

        def work() -> None:
            with self._pace.turn(self._closing) as turn:
                corpus.encoder.encode_isolated([chunk], turn)

        self._try(corpus.encoder, chunk, "the front copy of chunk %s is not stored", work)
        corpus.fronts.forget(chunk.id)  # it is not chosen again
        self._unchecked.append((chunk, corpus.fronts.done))
        if self._has_enough(corpus):
            self._check_made(corpus)
        return True

    def _has_enough(self, corpus: CorpusKV) -> bool:
        """Whether what was made is looked after now. A CPU is slower than a disk."""
        is_cpu = corpus.encoder.decoder.device.type == "cpu"
        return len(self._unchecked) >= (1 if is_cpu else MOST_UNCHECKED)

    def _check_made(self, corpus: CorpusKV) -> bool:
        """Write what was made, then look whether its chunks are still there, see the module; what
        was made of one that went is forgotten. False: nothing was made."""
        if not self._unchecked:
            return False
        corpus.flush()
        for chunk, note in self._unchecked:
            if corpus.was_deleted(chunk):
                corpus.forget(chunk)
            else:
                note(chunk)
        self._unchecked.clear()
        return True
