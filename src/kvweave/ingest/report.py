"""What an ingest tells: while it runs, and when it is done."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvweave.errors import KVWeaveError
from kvweave.types import ChunkId, EncodeWork

TOLD_S = 0.2  # between two reports of reading one source
Phase = Literal["read", "embed", "index", "encode", "neighbours"]


class Skipped(NamedTuple):
    """A file that did not get in, and why."""

    source: str
    reason: str


class IngestProgress(NamedTuple):
    """How far an ingest is."""

    phase: Phase
    done_bytes: int  # embedded counts, committed or not
    total_bytes: int | None  # None when the sources come from an iterator
    num_documents: int  # looked at so far
    num_chunks: int  # cut so far; in phases "encode" and "neighbours": handled
    source: str  # what is at hand
    total_chunks: int | None = None  # in phases "encode" and "neighbours"
    kv_bytes: int = 0  # written so far
    total_kv_bytes: int | None = None  # in phase "encode": with what is still to come
    num_tokens: int = 0  # in phase "encode": computed so far
    total_tokens: int = 0  # with those still to come
    eta_s: float | None = None  # until the end of the phase; None: not known


# Called on the ingesting thread, several times a second at most; must not block.
OnProgress = Callable[[IngestProgress], None]


@dataclass(frozen=True, slots=True)
class IngestReport:
    """The outcome. Everything counted here is on the disk."""

    added: int  # documents
    updated: int
    unchanged: int
    removed: int
    new_chunks: int
    shared_chunks: int  # of added and updated documents, already there before
    skipped: tuple[Skipped, ...]
    ignored_files: int  # in folders, of kinds that no parser knows
    orphaned: tuple[ChunkId, ...]  # chunks that no document uses any more: drop their KV
    elapsed_s: float
    kv_chunks: int = 0  # whose KV was computed
    kv_bytes: int = 0  # that it takes

    @property
    def is_in_vain(self) -> bool:
        """Whether there were files and none of them is in the knowledge base now."""
        is_idle = not (self.added or self.updated or self.unchanged or self.removed)
        return is_idle and bool(self.skipped or self.ignored_files)


class Tally:
    """What one ingest has counted so far. `reading.py` and `window.py` count here, on the thread
    that ingests."""

    def __init__(self, progress: OnProgress | None) -> None:
        self.added = self.updated = self.unchanged = self.removed = 0  # documents
        self.shared_chunks = 0
        self.ignored_files = 0
        self.new_ids: list[ChunkId] = []  # chunks that came, in the order they were committed
        self.orphaned: list[ChunkId] = []  # at some moment of this run; some may be back
        self.num_chunks = 0  # cut so far
        self.kv = EncodeWork()  # computed so far
        self.kv_total: EncodeWork | None = None  # with what is still to come
        self._kv_started_s = 0.0
        self.done_bytes = 0  # of sources whose documents are committed
        self.total_bytes: int | None = None
        self._skipped: list[Skipped] = []
        self._progress = progress
        self._started_s = self._told_s = time.monotonic()

    def skip(self, source: str, error: Exception) -> None:
        self.record_skipped(Skipped(source, reason_of(error)))

    def record_skipped(self, item: Skipped) -> None:
        self._skipped.append(item)

    def tell(self, phase: Phase, source: str = "", embedded_bytes: int = 0) -> None:
        """`embedded_bytes` count as done too: their vectors are kept."""
        self._tell(phase, self.done_bytes + embedded_bytes, self.num_chunks, source)

    def _tell(
        self, phase: Phase, done_bytes: int, num_chunks: int, source: str = "", **more: Any
    ) -> None:
        if self._progress is not None:
            looked_at = self.added + self.updated + self.unchanged
            counts = (done_bytes, self.total_bytes, looked_at, num_chunks)
            self._progress(IngestProgress(phase, *counts, source, **more))

    def tell_reading(self, source: str) -> None:
        """Tell that a source is being read; called very often, it tells a few times a second."""
        now_s = time.monotonic()
        if now_s - self._told_s >= TOLD_S:
            self._told_s = now_s
            self.tell("read", source)

    def begin_kv(self, work: EncodeWork) -> None:
        """Begin the count of KV: `work` is to be computed."""
        self.kv_total, self._kv_started_s = work, time.monotonic()
        self._tell_kv()

    def count_kv(self, work: EncodeWork) -> None:
        """Count KV that was computed."""
        self.kv = self.kv.plus(work)
        self._tell_kv()

    def _tell_kv(self) -> None:
        if self.kv_total is None:
            return
        eta_s, took_s = None, time.monotonic() - self._kv_started_s
        if self.kv.num_tokens:
            left = max(0, self.kv_total.num_tokens - self.kv.num_tokens)
            eta_s = took_s / self.kv.num_tokens * left
        self._tell(
            "encode",
            self.done_bytes,
            self.kv.num_chunks,
            total_chunks=self.kv_total.num_chunks,
            kv_bytes=self.kv.num_bytes,
            total_kv_bytes=self.kv_total.num_bytes,
            num_tokens=self.kv.num_tokens,
            total_tokens=self.kv_total.num_tokens,
            eta_s=eta_s,
        )

    def report(self, orphaned: Sequence[ChunkId]) -> IngestReport:
        """`orphaned` are those of `self.orphaned` that no later document took in again."""
        return IngestReport(
            added=self.added,
            updated=self.updated,
            unchanged=self.unchanged,
            removed=self.removed,
            new_chunks=len(self.new_ids),
            shared_chunks=self.shared_chunks,
            skipped=tuple(self._skipped),
            ignored_files=self.ignored_files,
            orphaned=tuple(orphaned),
            elapsed_s=time.monotonic() - self._started_s,
            kv_chunks=self.kv.num_chunks,
            kv_bytes=self.kv.num_bytes,
        )


def reason_of(error: Exception) -> str:
    """The reason of an error in one line. Our own errors say it all; of others the type tells as
    much as the words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = " ".join(str(error).split())[:200]
    if isinstance(error, KVWeaveError):
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
