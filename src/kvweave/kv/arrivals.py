"""One object on its way from a tier into host memory, layer by layer.

An arrival is shared: ten requests for one chunk wait on the same one. Readers are the IO threads of
the tier it comes from; each run of layers is read, checked and only then shown. Whatever goes wrong
ends the arrival with a reason; layers shown before stay valid, later ones never come.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvweave.errors import TierCorrupt, TierError, TierForeign
from kvweave.kv.io_pool import IoPool
from kvweave.kv.keys import ChunkKey
from kvweave.kv.layout import PRELUDE_BYTES, Header, check_section
from kvweave.kv.memory import Memory, new_memory
from kvweave.kv.objects import EncodedLayer, layer_of, read_header
from kvweave.kv.residency import Miss
from kvweave.kv.shelf import Entry
from kvweave.kv.tiers.base import Reader, Tier

_scratch = threading.local()


class Span(NamedTuple):
    """A run of bytes that is read at once: first layer, one past the last, and where they lie."""

    first: int
    end: int
    start_byte: int
    end_byte: int


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
        self._spans: list[Span] = []
        self._next_span = 0
        self._spans_done = 0
        self._ready: list[bool] = []
        self._wanted = 0  # layers [0, wanted) are asked for

    @property
    def failure(self) -> Miss | None:
        return self._failure

    def start(self) -> None:
        """Begin reading. Called once, without locks."""
        self._launch(self._open)

    def want(self, end: int) -> None:
        """Ask for layers [0, end). Returns at once; asking again is harmless."""
        with self._changed:
            if end <= self._wanted:
                return
            self._wanted = end
            spans = self._due_spans()
        self._read_all(spans)

    def wait_layer(self, layer: int) -> EncodedLayer | None:
        """Block until a layer is there. None: it will not come, see `failure`.

        Waits while reads of this object, or those queued before them, get on within `deadline_s`.
        """
        while True:
            # without the lock: entries only ever turn True, and readers must not slow each other
            if self._ready and self._ready[layer]:  # shown layers outlive a later failure
                assert self.header is not None
                assert self.landing is not None
                return layer_of(self.header, self.landing.memory, layer)
            with self._changed:
                if self._ready and self._ready[layer]:
                    continue
                if self._failure is not None:
                    return None
                left_s = self._patience_s()
                if left_s > 0:
                    self._changed.wait(min(left_s, 0.5))
                    continue
            self._fail_slow()

    def wait_header(self) -> Header | None:
        """Block until the header is known. None: it will not come, see `failure`."""
        while True:
            with self._changed:
                if self.header is not None or self._failure is not None:
                    return self.header
                left_s = self._patience_s()
                if left_s > 0:
                    self._changed.wait(min(left_s, 0.5))
                    continue
            self._fail_slow()

    def cancel(self) -> None:
        """Nobody wants it any more: reads under way finish, no new ones begin."""
        with self._changed:
            self._cancelled = True
            idle = self._running == 0
        if idle:
            self._hooks.idle(self)

    def close_reader(self) -> None:
        """Called by the store when the arrival is idle for good."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _patience_s(self) -> float:
        """How much longer to wait. The caller holds the lock."""
        if self._active:
            return self._deadline_s - (time.monotonic() - self._progress_s)
        return self._deadline_s - self._pool.stalled_s()

    def _fail_slow(self) -> None:
        self._fail(Miss.TOO_SLOW, f"nothing came for {self._deadline_s:g} s; check the device")

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
        header = read_header(reader, self.key, _thread_scratch())
        landing = self.landing = self._hooks.land(self, header)
        if header.header_bytes <= PRELUDE_BYTES:
            landing.memory.view[: header.header_bytes] = _thread_scratch()[: header.header_bytes]
        else:
            reader.read(0, landing.memory.view[: header.header_bytes])
        with self._changed:
            self.header = header
            self._spans = plan_spans(header, self._tier.best_read_bytes)
            self._ready = [False] * len(header.layers)
            spans = self._due_spans()
            self._changed.notify_all()
        self._read_all(spans)

    def _due_spans(self) -> list[Span]:
        """Spans that are wanted and not yet asked for. The caller holds the lock."""
        due: list[Span] = []
        while self._next_span < len(self._spans):
            span = self._spans[self._next_span]
            in_flight = self._next_span - self._spans_done
            if span.first >= self._wanted or in_flight >= self._max_in_flight:
                break
            due.append(span)
            self._next_span += 1
        return due

    def _read_all(self, spans: list[Span]) -> None:
        for span in spans:
            self._launch(lambda span=span: self._read_run(span))  # type: ignore[misc]

    def _read_run(self, span: Span) -> None:
        """Read a span and, while no other job waits for a thread, the ones after it: waking a
        thread costs about as much as reading a layer."""
        following = self._read(span)
        while following and not self._cancelled and self._failure is None:
            mine = None if self._pool.is_crowded() else following.pop(0)
            self._read_all(following)
            following = [] if mine is None else self._read(mine)

    def _read(self, span: Span) -> list[Span]:
        """Read, check and show one span; returns the spans that are due now."""
        header, landing, reader = self.header, self.landing, self._reader
        assert header is not None
        assert landing is not None
        assert reader is not None
        view = landing.memory.view
        reader.read(span.start_byte, view[span.start_byte : span.end_byte])
        sections = [(f"layer {i}", header.layers[i]) for i in range(span.first, span.end)]
        if span.first == 0:
            sections += header.extras.items()
        for name, section in sections:
            check_section(header, name, section, view[section.offset : header.padded_end(section)])
        with self._changed:
            self._ready[span.first : span.end] = [True] * (span.end - span.first)
            self._spans_done += 1
            done = self._spans_done == len(self._spans) and self._failure is None
            self._progress_s = time.monotonic()
            due = self._due_spans()
            self._changed.notify_all()
        if done:
            self._hooks.complete(self)
        return due

    def _fail(self, miss: Miss, detail: str) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = miss
            self._changed.notify_all()
        self._hooks.failed(self, miss, detail)


def plan_spans(header: Header, best_read_bytes: int) -> list[Span]:
    """Cut the layers into runs; extras ride with the first.

    Runs double from a sixteenth of `best_read_bytes` up to it: the first layer comes soon, the rest
    in few reads. Few matters: between reads a thread needs the interpreter lock, and two threads
    that ask for it every 50 µs take turns instead of working side by side.
    """
    spans: list[Span] = []
    first, start_byte, want_bytes = 0, header.header_bytes, best_read_bytes // 16
    for i, section in enumerate(header.layers):
        end_byte = header.padded_end(section)
        is_last = i == len(header.layers) - 1
        if is_last or end_byte - start_byte >= want_bytes:
            spans.append(Span(first, i + 1, start_byte, end_byte))
            first, start_byte = i + 1, end_byte
            want_bytes = min(2 * want_bytes, best_read_bytes)
    return spans


def _thread_scratch() -> memoryview:
    """A page-aligned page per IO thread to read headers into."""
    view: memoryview | None = getattr(_scratch, "view", None)
    if view is None:
        view = _scratch.view = new_memory(PRELUDE_BYTES, pinned=False).view
    return view
