"""One object on its way from a tier into host memory, layer by layer.

An arrival is shared: ten requests for one chunk wait on the same one. Readers are the IO threads of
the tier it comes from; each run of layers is read, checked and only then shown. Whatever goes wrong
ends the arrival with a reason; layers shown before stay valid, later ones never come.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvweave.errors import TierCorrupt, TierError, TierForeign
from kvweave.kv.io_pool import IoPool
from kvweave.kv.keys import ChunkKey
from kvweave.kv.layout import HEAD_BYTES, Header, check_section
from kvweave.kv.memory import Memory, new_memory
from kvweave.kv.objects import (
    EncodedLayer,
    extra_of,
    extra_tensor,
    layer_of,
    layers_of,
    read_head,
)
from kvweave.kv.residency import Miss
from kvweave.kv.shelf import Entry
from kvweave.kv.spans import ReadingOrder, Span
from kvweave.kv.tiers.base import Reader, Tier

_scratch = threading.local()


@dataclass(frozen=True, slots=True)
class Landing:
    """Where an arrival's bytes go, chosen by the store when the size is known."""

    memory: Memory
    stays: bool  # in the host tier once complete; otherwise staging memory


class Hooks(NamedTuple):
    """What the store does for an arrival. Called on IO threads, with no lock held."""

    land: Callable[["Arrival", Header], Landing]  # memory for an object of this header
    complete: Callable[["Arrival"], None]  # every layer is there and checked
    idle: Callable[["Arrival"], None]  # no IO thread touches it any more
    failed: Callable[["Arrival", Miss, str], None]  # once, with the reason in words


class Patience:
    """What one request may still wait for one tier. Belongs to the thread that waits."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self.left_s = budget_s


class Arrival:
    """Thread-safe. What belongs to the store is under its lock; all else is guarded in here."""

    def __init__(
        self, key: ChunkKey, tier: Tier, pool: IoPool, deadline_s: float, hooks: Hooks
    ) -> None:
        # few reads of one chunk at a time, so that the early layers of all chunks of a request
        # come before the late layers of one; more where a round trip costs more than the bytes
        self._max_in_flight = 4 if tier.remote else 2
        self.key = key
        self.tier_name = tier.name
        self.source: Entry | None = None  # these four belong to the store: what it is read from,
        self.users = 0  # leases that hold it,
        self.kept: Entry | None = None  # the object of the host tier it became,
        self.disposed = False  # its memory was given back
        self.header: Header | None = None
        self.landing: Landing | None = None
        self._tier = tier
        self._pool = pool
        self._deadline_s = deadline_s
        self._hooks = hooks
        self._changed = threading.Condition()
        self._reader: Reader | None = None
        self._failure: Miss | None = None
        self._cancelled = False
        self._running = 0  # jobs submitted and not finished: they may write into the memory
        self._active = 0  # those of them that a thread has begun
        self._progress_s = 0.0  # when one of them last began or finished
        self.began_s = self.ended_s = 0.0  # first read asked for, last layer shown
        self._order = ReadingOrder()
        self._reading = 0  # jobs that will each take a span, submitted and not finished
        self._spans_left = 0  # not read yet; meaningless before the header is known
        self._ready: list[bool] = []
        self._awaited: list[int] = []  # layers that some thread waits for, one each

    @property
    def failure(self) -> Miss | None:
        return self._failure

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

    def wait_layer(self, layer: int, patience: Patience) -> EncodedLayer | None:
        """Block until a layer is there, whatever else is. None: it will not come, see `failure`; if
        that is None as well, the object has no such layer.

        Waits while reads of this object, or those queued before them, get on within `deadline_s`,
        and no longer than `patience` lasts, which the wait uses up.
        """
        while True:
            # without the lock: entries only ever turn True, and readers must not slow each other
            if layer < len(self._ready) and self._ready[layer]:  # outlives a later failure
                assert self.header is not None
                assert self.landing is not None
                return layer_of(self.header, self.landing.memory, layer)
            with self._changed:
                if layer < len(self._ready) and self._ready[layer]:
                    continue
                if self._failure is not None or (self.header and layer >= len(self._ready)):
                    return None
                self._awaited.append(layer)
                try:
                    if self._wait_some(patience):
                        continue
                finally:
                    self._awaited.remove(layer)
            self._fail_slow(patience)

    def is_ready(self, layer: int) -> bool:
        """Whether `wait_layer` would return at once, with the layer or without."""
        ready = self._ready  # entries only ever turn True; the list is replaced once, when empty
        return self._failure is not None or (layer < len(ready) and ready[layer])

    def whole(self) -> Tensor | None:
        """All layers, see `layers_of`; None while some are not there."""
        ready = self._ready
        if not ready or not all(ready):
            return None
        assert self.header is not None
        assert self.landing is not None
        return layers_of(self.header, self.landing.memory)

    def named_extra(self, name: str) -> memoryview | None:
        """A named extra, checked and read-only. Call when `wait_header` gave a header."""
        assert self.header is not None
        assert self.landing is not None
        return extra_of(self.header, self.landing.memory, name)

    def named_tensor(self, name: str) -> Tensor | None:
        """As `named_extra`, to copy from."""
        assert self.header is not None
        assert self.landing is not None
        return extra_tensor(self.header, self.landing.memory, name)

    def wait_header(self, patience: Patience) -> Header | None:
        """Block until the header is known. None: it will not come, see `failure`."""
        while True:
            with self._changed:
                if self.header is not None or self._failure is not None:
                    return self.header
                if self._wait_some(patience):
                    continue
            self._fail_slow(patience)

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
            layers = zip(header.layers, self._ready, strict=False)  # the list comes a moment later
            return sum(section.size_bytes for section, is_here in layers if not is_here)

    def close_reader(self) -> None:
        """Called by the store when the arrival is idle for good."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _wait_some(self, patience: Patience) -> bool:
        """Wait a moment for a change. False: long enough. The caller holds the lock."""
        now_s = time.monotonic()
        stalled_s = now_s - self._progress_s if self._active else self._pool.stalled_s()
        left_s = min(self._deadline_s - stalled_s, patience.left_s)
        if left_s <= 0:
            return False
        self._changed.wait(min(left_s, 0.5))
        patience.left_s -= time.monotonic() - now_s
        return True

    def _fail_slow(self, patience: Patience) -> None:
        what = (
            f"its bytes drip: {patience.budget_s:g} s were not enough"
            if patience.left_s <= 0
            else f"nothing came for {self._deadline_s:g} s"
        )
        self._fail(Miss.TOO_SLOW, f"{what}; check the device")

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
            self.header = header
            self._spans_left = self._order.plan(header, self._tier.best_read_bytes)
            self._ready = [False] * len(header.layers)
            num_jobs = self._due_jobs()
            self._changed.notify_all()
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
            self._ready[span.first : span.end] = [True] * (span.end - span.first)
            self._spans_left -= 1
            done = self._spans_left == 0 and self._failure is None
            self._progress_s = self.ended_s = time.monotonic()
            num_jobs = self._due_jobs()
            # who waits for another layer would only take a core from the readers to find that out
            if any(span.first <= layer < span.end for layer in self._awaited):
                self._changed.notify_all()
        if done:
            self._hooks.complete(self)
        self._launch_reads(num_jobs)

    def _fail(self, miss: Miss, detail: str) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = miss
            self._changed.notify_all()
        self._hooks.failed(self, miss, detail)


def _thread_scratch() -> memoryview:
    """A few page-aligned pages per IO thread to read headers into."""
    view: memoryview | None = getattr(_scratch, "view", None)
    if view is None:
        view = _scratch.view = new_memory(HEAD_BYTES, pinned=False).view
    return view
