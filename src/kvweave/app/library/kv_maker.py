"""Makes chunk KV in the background: one thread for all that a knowledge base, or the memory of
documents, wants stored.

    1  what requests brought again, and what stood in front for the first time   (`kv_behind.py`)
    2  chunks of the knowledge base without KV, most asked for first             (`corpus_kv.py`)
    3  front copies of the others, most asked for first, begun when it is quiet   (`front_kv.py`)

One chunk at a time, a few layers at a time, when the engine may be had (`engine/background.py`): an
answer that comes meanwhile waits for a slice, never for a chunk.

A chunk may be deleted while its KV is in the making. So its KV is written first, and then it is
looked whether the chunk is still there: a deletion before that look is seen by it, a deletion after
it finds the KV where it lies. No lock of the knowledge base is held meanwhile.
"""

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from kvweave.app.library.corpus_kv import CorpusKV
from kvweave.app.library.kv_progress import KVProgress
from kvweave.engine.background import BackgroundPace, GaveUp
from kvweave.errors import CorpusError, EngineClosed, KVWeaveError
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder, Pace
from kvweave.plan.ordering import AccessTable
from kvweave.types import Chunk, ChunkId

log = logging.getLogger(__name__)

CLOSE_WAIT_S = 10.0  # more than a slice and a flush take
PREPARE_S = 30.0  # until it is tried again to begin, where a tier was broken at the start
LOOK_S = 2.0  # how often it looks whether another process has brought documents
MAX_WAITING = 64  # chunks that requests want stored; more are left for the next time they are seen
IsGone = Callable[[ChunkId, int], bool]  # whether a chunk found then was deleted since


class WantedKV(NamedTuple):
    """A chunk whose KV some request would have found useful."""

    encoder: ChunkEncoder
    chunk: Chunk
    as_of: int | None  # when it was found; None: it cannot be deleted
    in_front: bool  # isolated, as it is taken right behind the preamble

    @property
    def name(self) -> str:
        """A chunk behind one preamble: behind another it is another one."""
        context = self.encoder.context.context_id().hex()
        return f"{context}|{self.chunk.id}|{self.in_front}"

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
        self, pace: BackgroundPace, is_gone: IsGone, corpus: CorpusKV | None = None
    ) -> None:
        """`is_gone`: of a chunk that was found some time ago, whether it was deleted since; then it
        is not stored. `corpus` None: only what requests want is made."""
        self._pace = pace
        self._is_gone = is_gone
        self._corpus = corpus
        self._closing = threading.Event()
        self._changed = threading.Condition()  # guards the rest
        self._wanted: deque[WantedKV] = deque()
        self._names: set[str] = set()  # of those, and of the one in the making
        self._is_making = False
        self._asked = AccessTable()
        self._asked_ids: dict[ChunkId, None] = {}  # that have a count, as far as remembered
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
        with self._changed:
            self._asked.push(chunk_ids)
            self._asked_ids |= dict.fromkeys(chunk_ids)
            if len(self._asked_ids) > 2 * len(self._asked):
                counted = (c for c in self._asked_ids if self._asked.count(c))
                self._asked_ids = dict.fromkeys(counted)

    def look(self) -> None:
        """Documents came or went."""
        with self._changed:
            self._changed.notify_all()

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
        is_done = not self._names and not self._is_making
        corpus = self._corpus
        if not is_done or corpus is None:
            return is_done
        return corpus.nothing_left() and (corpus.is_unused or corpus.fronts.nothing_left())

    def _work(self) -> None:
        corpus: CorpusKV | None = None  # as soon as it is prepared
        prepare_s = 0.0  # when that is tried
        while not self._closing.is_set():
            if corpus is None and self._may_prepare() and time.monotonic() >= prepare_s:
                assert self._corpus is not None, "there is one to prepare"
                corpus = self._corpus if self._corpus.prepare() else None
                prepare_s = time.monotonic() + PREPARE_S
            try:
                did_something = self._make_one(corpus)
            except (GaveUp, EngineClosed):
                return
            if not did_something:
                self._rest(corpus)

    def _make_one(self, corpus: CorpusKV | None) -> bool:
        """Make the KV whose turn it is. False: there is none, or it is tried again."""
        try:
            if self._make_wanted():
                return True
            return corpus is not None and (self._make_next(corpus) or self._make_front(corpus))
        except (GaveUp, EngineClosed):
            raise
        except (KVWeaveError, sqlite3.Error, OSError) as error:
            log.warning("chunk KV in the background: %s; tried again", error)
            return False

    def _rest(self, corpus: CorpusKV | None) -> None:
        """Wait until something is wanted, or a moment where documents may come."""
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
        """Run what makes the KV of a chunk. Returns what the device raised, logged and counted:
        answers go on. Raises GaveUp, EngineClosed."""
        with self._changed:
            self._is_making = True
        try:
            work()
        except (GaveUp, EngineClosed):
            raise
        except Exception as error:
            log.exception(words, chunk.id)
            encoder.store.metrics.count("kv_not_made_total", reason=type(error).__name__)
            return error
        finally:
            with self._changed:
                self._is_making = False
                self._changed.notify_all()
        return None

    def _make(self, wanted: WantedKV) -> None:
        encoder, chunk, as_of, _ = wanted
        if not wanted.is_absent():
            return
        with self._pace.turn(self._closing) as turn:
            turn.wait()
            if self._was_deleted(chunk, as_of):
                return
            wanted.encode(turn)
        if as_of is not None:
            encoder.store.flush()  # a deletion from now on finds it where it lies
        if self._was_deleted(chunk, as_of):  # meanwhile, before there was anything to delete
            _delete(encoder, chunk)
        elif self._corpus is not None and encoder is self._corpus.encoder and wanted.in_front:
            self._corpus.fronts.add([chunk])  # so that it gives way like the others

    def _was_deleted(self, chunk: Chunk, as_of: int | None) -> bool:
        return as_of is not None and self._is_gone(chunk.id, as_of)

    def _make_next(self, corpus: CorpusKV) -> bool:
        """Make the chunk of the knowledge base whose turn it is. False: there is none, or another
        process writes."""
        corpus.look()
        chunk = corpus.next(self._asked.count, self._list_asked())
        if chunk is None:
            return False
        is_busy = False

        def work() -> None:
            nonlocal is_busy
            try:
                with self._pace.turn(self._closing, idle_only=corpus.is_idle_only) as turn:
                    if not corpus.is_idle_only:
                        turn.wait()
                    corpus.make(chunk, turn)
                if self._is_kept(corpus, chunk):
                    corpus.note_made(chunk)
            except CorpusError:
                is_busy = True

        error = self._try(corpus.encoder, chunk, "the KV of chunk %s is not stored", work)
        if error is not None:
            corpus.leave_out(chunk, error)
            self._is_kept(corpus, chunk)
        return not is_busy

    def _make_front(self, corpus: CorpusKV) -> bool:
        """Make the front copy whose turn it is. False: there is none, or answers are in the making:
        then what requests want must not wait behind it."""
        if not self._pace.is_quiet():
            return False
        chunk = corpus.fronts.next(self._asked.count, self._list_asked())
        if chunk is None:
            return False

        def work() -> None:
            # begun when it is quiet, gone on with in small shares beside answers: what has its turn
            # behind this one must not wait until it is quiet again
            with self._pace.turn(self._closing) as turn:
                corpus.encoder.encode_isolated([chunk], turn)

        self._try(corpus.encoder, chunk, "the front copy of chunk %s is not stored", work)
        if self._is_kept(corpus, chunk):
            corpus.fronts.done(chunk)
        return True

    def _list_asked(self) -> list[ChunkId]:
        with self._changed:
            return list(self._asked_ids)

    def _is_kept(self, corpus: CorpusKV, chunk: Chunk) -> bool:
        """Write what was made, then look whether its chunk is still there, see the module; what is
        made of one that went is forgotten."""
        corpus.flush()
        if corpus.was_deleted(chunk):
            corpus.forget(chunk)
            return False
        return True


def _delete(encoder: ChunkEncoder, chunk: Chunk) -> None:
    encoder.store.delete([encoder.exact_key(chunk.token_ids), encoder.key(chunk.token_ids)])
