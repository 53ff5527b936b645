"""Brings one object from a tier into host memory: its reads, on the IO threads of that tier.

Each run of layers is read, checked and only then shown to the threads that wait (`arrival.py`).
Whatever goes wrong with them ends the arrival with a reason; layers shown before stay valid, later
ones never come.

Of the extras only those are read that some load has asked for, before the layers, or after them
for a load that joins later, and those that say whose text it is. The place of the others in
memory is empty. An extra that cannot be had is lost to loads that want it and costs others nothing,
but for what says whose text it is: no copy can do without.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import NamedTuple

from kvweave.errors import TierCorrupt, TierError, TierForeign
from kvweave.kv.arrival import Arrival
from kvweave.kv.format.header import FRONT_BYTES, HEAD_BYTES, Header, Reader, Section, check_section
from kvweave.kv.format.memory import new_memory
from kvweave.kv.format.objects import read_head
from kvweave.kv.provenance import PROVENANCE
from kvweave.kv.tier_slot import IoPool
from kvweave.kv.tiers.base import Tier
from kvweave.reasons import Reason


class ReadSpan(NamedTuple):
    """A run of bytes that is read at once: first layer, one past the last, and where they lie."""

    first: int
    end: int
    start_byte: int
    end_byte: int


def plan_spans(
    header: Header, best_read_bytes: int, first_layers: Collection[int] = ()
) -> list[ReadSpan]:
    """Cut the layers into runs, in the order they lie in the object.

    Runs double from a sixteenth of `best_read_bytes` up to it: the first layer comes soon, the rest
    in few reads. Few matters: between reads a thread needs the interpreter lock, and two threads
    that ask for it every 50 µs take turns instead of working side by side. `first_layers` share no
    run with others, so that nothing comes along that is not waited for yet.
    """
    spans: list[ReadSpan] = []
    first, want_bytes = 0, best_read_bytes // 16
    num_layers = len(header.layers)
    for i in range(num_layers):
        start_byte, end_byte = header.layers[first].offset, header.padded_end(header.layers[i])
        is_last = i == num_layers - 1 or (i in first_layers) != (i + 1 in first_layers)
        if is_last or end_byte - start_byte >= want_bytes:
            spans.append(ReadSpan(first, i + 1, start_byte, end_byte))
            first = i + 1
            want_bytes = min(2 * want_bytes, best_read_bytes)
    return spans


def extra_runs(header: Header, names: Collection[str]) -> list[tuple[int, int]]:
    """Where these extras lie: start and end of each run of bytes, in order."""
    runs: list[tuple[int, int]] = []
    for name, section in header.extras.items():
        if name in names:
            start, end = section.offset, header.padded_end(section)
            if runs and runs[-1][1] == start:
                start, _ = runs.pop()
            runs.append((start, end))
    return runs


class ReadingOrder:
    """Which run of layers is read next. Layers are asked for by number, before or after the header
    is there, and taken as spans once it is."""

    def __init__(self) -> None:
        self._asked: deque[int] = deque()  # layers not looked at yet, in the order asked for
        self._first: set[int] = set()
        self._span_of: list[ReadSpan] = []  # by layer; empty until planned
        self._taken: set[ReadSpan] = set()

    def ask(self, layers: Iterable[int]) -> None:
        """Ask for layers after all that was asked for before. Asking again is harmless."""
        self._asked.extend(layers)

    def ask_first(self, layers: Iterable[int]) -> None:
        """These come before all that was asked for, in this order, in runs of their own if the
        object is not open yet."""
        layers = list(layers)
        self._first.update(layers)
        self._asked.extendleft(reversed(layers))

    def plan(self, header: Header, best_read_bytes: int) -> int:
        """The object is open: from now on there are spans to take. Returns how many in all."""
        spans = plan_spans(header, best_read_bytes, self._first)
        self._span_of = [span for span in spans for _ in range(span.first, span.end)]
        return len(spans)

    def num_due(self, most: int) -> int:
        """How many spans can be taken now; counts no further than `most`."""
        due: set[ReadSpan] = set()
        for layer in self._asked:
            if len(due) >= most:
                break
            if layer < len(self._span_of) and self._span_of[layer] not in self._taken:
                due.add(self._span_of[layer])
        return len(due)

    def take(self) -> ReadSpan | None:
        """The next span to read, once. None: nothing that was asked for is left."""
        while self._asked and self._span_of:
            layer = self._asked.popleft()
            if layer >= len(self._span_of) or self._span_of[layer] in self._taken:
                continue  # there is no such layer, or it came along with another
            span = self._span_of[layer]
            self._taken.add(span)
            return span
        return None


_scratch = threading.local()


class ArrivalReads:
    """The reads of one arrival. Thread-safe: shares the arrival's lock.

    For an arrival that is open from the start (a copy in host memory that lacks extras) only extras
    are read.
    """

    def __init__(self, arrival: Arrival, tier: Tier, pool: IoPool) -> None:
        self.arrival = arrival
        self._changed = arrival.changed
        self._tier = tier
        self._pool = pool
        # few reads of one chunk at a time, so that the early layers of all chunks of a request
        # come before the late layers of one; more where a round trip costs more than the bytes
        self._max_in_flight = 4 if tier.remote else 2
        self._reader: Reader | None = None
        self._order = ReadingOrder()
        self._wanted = PROVENANCE  # extras that a load asked for, and these
        self._taken = arrival.held  # extras read, or being read
        self._cancelled = False
        self._running = 0  # jobs submitted and not finished: they may write into the memory
        self._reading = 0  # those of them that will each take a span
        self._spans_left = 0  # not read yet; meaningless before the header is known

    def start(self) -> None:
        """Begin reading. Called once, without locks."""
        self.arrival.began_s = time.monotonic()
        self._launch(self._open)

    def want(self, layers: Iterable[int]) -> None:
        """Ask for layers, after those asked for before. Returns at once; asking again, or for
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

    def want_extras(self, names: Collection[str]) -> None:
        """Ask for extras, those that the object has. Returns at once."""
        with self._changed:
            self._wanted |= frozenset(names)
        self._launch_extras()

    def cancel(self) -> None:
        """No load wants it any more: reads under way finish, no new ones begin."""
        with self._changed:
            self._cancelled = True
            idle = self._running == 0
        if idle:
            self._idle()

    def bytes_left(self) -> int:
        """What is still to come. Before the header is known: what the books say of its size. The
        store's lock is held."""
        source = self.arrival.record.source
        with self._changed:
            if self._cancelled or self.arrival.failure is not None:
                return 0
            if self.arrival.header is None:
                return 0 if source is None else source.size_bytes
            return self.arrival.bytes_left(self._wanted)

    # ---- jobs

    def _launch(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._running += 1

        def run() -> None:
            with self._changed:
                self.arrival.read_began()
            try:
                if not self._is_over():
                    self._attempt(job)
            finally:
                with self._changed:
                    self.arrival.read_ended()
                    self._running -= 1
                    idle = self._running == 0
                if idle:
                    self._idle()

        if not self._pool.submit(run):
            with self._changed:
                self._running -= 1
            self.arrival.fail(Reason.TIER_FAILED, "the store was closed")

    def _attempt(self, job: Callable[[], None]) -> None:
        try:
            job()
        except TierError as error:
            self.arrival.fail(_miss_of(error), str(error))
        except Exception as error:  # a bug: no thread may wait for it forever, and it must be seen
            self.arrival.fail(Reason.TIER_FAILED, f"{type(error).__name__}: {error}")
            raise

    def _is_over(self) -> bool:
        return self._cancelled or self.arrival.failure is not None

    def _idle(self) -> None:
        """No job is left, for now or for good. With no lock held."""
        if self.arrival.owner.idle(self.arrival):
            reader, self._reader = self._reader, None
            if reader is not None:
                reader.close()

    # ---- the front

    def _open(self) -> None:
        reader = self._reader = self._tier.open(self.arrival.key)
        if reader is None:
            self.arrival.fail(Reason.ABSENT, "it is gone")
            return
        # of an arrival that is open no header is read: an extra of another making does not match
        # the checksum that came with the layers
        header = self.arrival.header
        if header is None:
            self._read_front(reader)
        elif reader.size_bytes != header.total_bytes:
            raise TierCorrupt(f"object has {reader.size_bytes} bytes, not {header.total_bytes}")
        self._launch_extras()

    def _read_front(self, reader: Reader) -> None:
        """Read the header and the extras that are wanted by now, and open the arrival up."""
        arrival = self.arrival
        # small extras come along with the header, where any are wanted
        scratch = _thread_scratch()[: HEAD_BYTES if self._wanted - PROVENANCE else FRONT_BYTES]
        header, raw = read_head(reader, arrival.key, scratch)
        landing = arrival.landing = arrival.owner.land(arrival, header)
        with self._changed:
            self._taken = frozenset(
                name for name in header.extras if landing.whole or name in self._wanted
            )
        damaged = self._take_front(reader, header, raw, landing.memory.view)
        if arrival.owner.refuses(arrival, header, landing.memory):
            arrival.fail(Reason.ABSENT, "its document was removed")
            return
        with self._changed:
            arrival.front = self._taken
            arrival.held = self._taken - damaged.keys()
            arrival.lose(dict.fromkeys(damaged, Reason.CORRUPT))
            arrival.open_up(header)
            self._spans_left = self._order.plan(header, self._tier.best_read_bytes)
            num_jobs = self._due_jobs()
        if damaged:
            arrival.owner.report_failure(arrival, Reason.CORRUPT, "; ".join(damaged.values()))
        self._launch_reads(num_jobs)

    def _take_front(
        self, reader: Reader, header: Header, raw: memoryview, view: memoryview
    ) -> dict[str, str]:
        """Header and wanted extras into memory: what was read is copied, the rest read. Checked.
        Returns what is wrong with damaged ones."""
        view[: header.header_bytes] = raw[: header.header_bytes]
        for start, end in extra_runs(header, self._taken):
            here = max(start, min(len(raw), end))
            view[start:here] = raw[start:here]
            if here < end:
                reader.read(here, view[here:end])
        damaged: dict[str, str] = {}
        for name in self._taken:
            section = header.extras[name]
            data = view[section.offset : header.padded_end(section)]
            try:
                check_section(header, name, section, data)
            except TierCorrupt as error:
                if name in PROVENANCE:
                    raise
                damaged[name] = str(error)
        return damaged

    # ---- layers

    def _due_jobs(self) -> int:
        """How many jobs to launch now, counted as launched. The lock is held."""
        if self._is_over():
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
            while not self._is_over():
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

    def _read(self, span: ReadSpan) -> None:
        """Read, check and show one span."""
        arrival, reader = self.arrival, self._reader
        header, landing = arrival.header_and_landing()
        assert reader is not None
        view = landing.memory.view
        reader.read(span.start_byte, view[span.start_byte : span.end_byte])
        for i in range(span.first, span.end):
            section = header.layers[i]
            span_bytes = view[section.offset : header.padded_end(section)]
            check_section(header, f"layer {i}", section, span_bytes)
        with self._changed:
            arrival.show(span.first, span.end)
            self._spans_left -= 1
            done = self._spans_left == 0 and arrival.failure is None
            num_jobs = self._due_jobs()
        if done:
            arrival.owner.complete(arrival)
        self._launch_reads(num_jobs)

    # ---- extras that are asked for when the front was read already

    def _launch_extras(self) -> None:
        with self._changed:
            header = self.arrival.header
            if header is None or self._reader is None or self._is_over():
                return
            due = self._wanted & header.extras.keys() - self._taken
            self._taken |= due
        for name in sorted(due):
            self._launch(partial(self._read_extra, header, name, header.extras[name]))

    def _read_extra(self, header: Header, name: str, section: Section) -> None:
        """Read and check one, apart: others may be reading what lies in memory."""
        arrival, reader = self.arrival, self._reader
        assert reader is not None
        padded = header.padded_end(section) - section.offset
        data = new_memory(padded, pinned=False).view[:padded]
        try:
            reader.read(section.offset, data)
            check_section(header, name, section, data)
        except TierError as error:
            with self._changed:
                arrival.lose({name: _miss_of(error)})
            arrival.owner.report_failure(arrival, _miss_of(error), str(error))
            return
        arrival.owner.fill(arrival, name, data)
        with self._changed:
            arrival.show_extra()


def _miss_of(error: TierError) -> Reason:
    """What waiting threads are told."""
    match error:
        case TierCorrupt():
            return Reason.CORRUPT
        case TierForeign():
            return Reason.FOREIGN
        case _:
            return Reason.TIER_FAILED


def _thread_scratch() -> memoryview:
    """A few page-aligned pages per IO thread to read headers into."""
    view: memoryview | None = getattr(_scratch, "view", None)
    if view is None:
        view = _scratch.view = new_memory(HEAD_BYTES, pinned=False).view
    return view
