"""Brings one object from a tier into host memory, layer by layer.

Readers are the IO threads of the tier it comes from; each run of layers is read, checked and only
then shown to those who wait (`awaited.py`). Whatever goes wrong ends the arrival with a reason;
layers shown before stay valid, later ones never come.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvweave.errors import TierCorrupt, TierError, TierForeign
from kvweave.kv.awaited import Awaited, Landing
from kvweave.kv.io_pool import IoPool
from kvweave.kv.keys import ChunkKey
from kvweave.kv.layout import HEAD_BYTES, Header, check_section
from kvweave.kv.memory import new_memory
from kvweave.kv.objects import read_head
from kvweave.kv.residency import Miss
from kvweave.kv.shelf import Entry
from kvweave.kv.spans import ReadingOrder, Span
from kvweave.kv.tiers.base import Reader, Tier

_scratch = threading.local()


class Hooks(NamedTuple):
    """What the store does for an arrival. Called on IO threads, with no lock held."""

    land: Callable[["Arrival", Header], Landing]  # memory for an object of this header
    complete: Callable[["Arrival"], None]  # every layer is there and checked
    idle: Callable[["Arrival"], None]  # no IO thread touches it any more
    failed: Callable[["Arrival", Miss, str], None]  # once, with the reason in words


class Arrival(Awaited):
    """Thread-safe. What belongs to the store is under its lock; all else is guarded in here."""

    def __init__(
        self, key: ChunkKey, tier: Tier, pool: IoPool, deadline_s: float, hooks: Hooks
    ) -> None:
        super().__init__(tier.name, deadline_s)
        # few reads of one chunk at a time, so that the early layers of all chunks of a request
        # come before the late layers of one; more where a round trip costs more than the bytes
        self._max_in_flight = 4 if tier.remote else 2
        self.key = key
        self.source: Entry | None = None  # these four belong to the store: what it is read from,
        self.users = 0  # leases that hold it,
        self.kept: Entry | None = None  # the object of the host tier it became,
        self.disposed = False  # its memory was given back
        self._tier = tier
        self._pool = pool
        self._hooks = hooks
        self._reader: Reader | None = None
        self._cancelled = False
        self._running = 0  # jobs submitted and not finished: they may write into the memory
        self._active = 0  # those of them that a thread has begun
        self._progress_s = 0.0  # when one of them last began or finished
        self._order = ReadingOrder()
        self._reading = 0  # jobs that will each take a span, submitted and not finished
        self._spans_left = 0  # not read yet; meaningless before the header is known

    def start(self) -> None:
        """Begin reading. Called once, without locks."""
        self.began_s = time.monotonic()
        self._launch(self._open)

    def want(self, layers: Iterable[int]) -> None:
        """Ask for layers, behind those asked for before. Returns at once; asking again, or for
        layers that the object does not have, is harmless."""
        with self._changed:
            self._order.ask(layers)
            num_jobs = self._due_jobs()
        self._launch_reads(num_jobs)

    def want_first(self, layers: Iterable[int]) -> None:
        """Ask for layers ahead of all others. Reads under way are not called back."""
        with self._changed:
            self._order.ask_first(layers)
            num_jobs = self._due_jobs()
        self._launch_reads(num_jobs)

    def cancel(self) -> None:
        """Nobody wants it any more: reads under way finish, no new ones begin."""
        with self._changed:
            self._cancelled = True
            idle = self._running == 0
        if idle:
            self._hooks.idle(self)

    def bytes_left(self) -> int:
        """What is still to come. Before the header is known: what the books say of its size."""
        with self._changed:
            header = self.header
            if self._failure is not None or self._cancelled:
                return 0
            if header is None:
                return 0 if self.source is None else self.source.size_bytes
            layers = zip(header.layers, self._ready, strict=True)
            return sum(section.size_bytes for section, is_here in layers if not is_here)

    def close_reader(self) -> None:
        """Called by the store when the arrival is idle for good."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _stalled_s(self) -> float:
        """Since a read of this object began or finished; of those queued before it if none did."""
        return time.monotonic() - self._progress_s if self._active else self._pool.stalled_s()

    def _on_failure(self, miss: Miss, detail: str) -> None:
        self._hooks.failed(self, miss, detail)

    def _launch(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._running += 1

        def run() -> None:
            with self._changed:
                self._active += 1
                self._progress_s = time.monotonic()
            try:
                if not self._cancelled and self._failure is None:
                    self._attempt(job)
            finally:
                with self._changed:
                    self._active -= 1
                    self._progress_s = time.monotonic()
                    self._running -= 1
                    idle = self._running == 0
                if idle:
                    self._hooks.idle(self)

        if not self._pool.submit(run):
            with self._changed:
                self._running -= 1
            self._fail(Miss.TIER_FAILED, "the store was closed")

    def _attempt(self, job: Callable[[], None]) -> None:
        try:
            job()
        except TierCorrupt as error:
            self._fail(Miss.CORRUPT, str(error))
        except TierForeign as error:
            self._fail(Miss.FOREIGN, str(error))
        except TierError as error:
            self._fail(Miss.TIER_FAILED, str(error))
        except Exception as error:  # a bug: nobody may wait for it forever, and it must be seen
            self._fail(Miss.TIER_FAILED, f"{type(error).__name__}: {error}")
            raise

    def _open(self) -> None:
        reader = self._tier.open(self.key)
        if reader is None:
            self._fail(Miss.ABSENT, "it is gone")
            return
        self._reader = reader
        header, raw = read_head(reader, self.key, _thread_scratch())
        landing = self.landing = self._hooks.land(self, header)
        self._take_front(reader, header, raw, landing.memory.view[: header.layers[0].offset])
        with self._changed:
            self._open_up(header)
            self._spans_left = self._order.plan(header, self._tier.best_read_bytes)
            num_jobs = self._due_jobs()
        self._launch_reads(num_jobs)

    def _take_front(
        self, reader: Reader, header: Header, raw: memoryview, front: memoryview
    ) -> None:
        """Header and extras into memory: what was checked is copied, the rest read and checked."""
        at = min(len(raw), len(front))
        front[:at] = raw[:at]
        if at < len(front):
            reader.read(at, front[at:])
        for name, section in header.extras.items():
            check_section(header, name, section, front[section.offset : header.padded_end(section)])

    def _due_jobs(self) -> int:
        """How many jobs to launch now, counted as launched. The caller holds the lock."""
        if self._cancelled or self._failure is not None:
            return 0
        num_jobs = self._order.num_due(self._max_in_flight - self._reading)
        self._reading += num_jobs
        return num_jobs

    def _launch_reads(self, num_jobs: int) -> None:
        for _ in range(num_jobs):
            self._launch(self._read_on)

    def _read_on(self) -> None:
        """Read the span that is due by now and, while no other job waits for a thread, the ones
        after it: waking a thread costs about as much as reading a layer."""
        try:
            while not self._cancelled and self._failure is None:
                with self._changed:
                    span = self._order.take()
                if span is None:
                    break
                self._read(span)
                if self._pool.is_crowded():
                    break
        finally:
            with self._changed:
                self._reading -= 1
                num_jobs = self._due_jobs()
        self._launch_reads(num_jobs)

    def _read(self, span: Span) -> None:
        """Read, check and show one span."""
        header, landing, reader = self.header, self.landing, self._reader
        assert header is not None
        assert landing is not None
        assert reader is not None
        view = landing.memory.view
        reader.read(span.start_byte, view[span.start_byte : span.end_byte])
        for i in range(span.first, span.end):
            section = header.layers[i]
            span_bytes = view[section.offset : header.padded_end(section)]
            check_section(header, f"layer {i}", section, span_bytes)
        with self._changed:
            self._show(span)
            self._spans_left -= 1
            done = self._spans_left == 0 and self._failure is None
            self._progress_s = self.ended_s
            num_jobs = self._due_jobs()
        if done:
            self._hooks.complete(self)
        self._launch_reads(num_jobs)


def _thread_scratch() -> memoryview:
    """A few page-aligned pages per IO thread to read headers into."""
    view: memoryview | None = getattr(_scratch, "view", None)
    if view is None:
        view = _scratch.view = new_memory(HEAD_BYTES, pinned=False).view
    return view
