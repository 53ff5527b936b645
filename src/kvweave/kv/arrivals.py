"""Brings one object from a tier into host memory, layer by layer.

Readers are the IO threads of the tier it comes from (`reads.py`); each run of layers is read,
checked and only then shown to those who wait (`awaited.py`). Whatever goes wrong with them ends the
arrival with a reason; layers shown before stay valid, later ones never come. What lies beside the
layers is read as `beside.py` says.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvweave.kv.awaited import Landing
from kvweave.kv.beside import Beside
from kvweave.kv.format.header import FRONT_BYTES, HEAD_BYTES, Header, check_section
from kvweave.kv.format.objects import read_head
from kvweave.kv.io_pool import IoPool
from kvweave.kv.keys import ChunkKey
from kvweave.kv.memory import new_memory
from kvweave.kv.provenance import PROVENANCE
from kvweave.kv.read_plan import ReadingOrder, ReadSpan
from kvweave.kv.residency import Miss
from kvweave.kv.tier_budget import TierEntry
from kvweave.kv.tiers.base import Reader, Tier

_scratch = threading.local()


class Hooks(NamedTuple):
    """What the store does for an arrival. Called on IO threads, with no lock held."""

    land: Callable[["Arrival", Header], Landing]  # memory for an object of this header
    complete: Callable[["Arrival"], None]  # every layer is there and checked
    fill: Callable[["Arrival", str, memoryview], None]  # put an extra that came late into memory
    idle: Callable[["Arrival"], None]  # no IO thread touches it any more
    failed: Callable[["Arrival", Miss, str], None]  # it or an extra of it, with the reason in words


class Arrival(Beside):
    """Thread-safe. What belongs to the store is under its lock; all else is guarded in here."""

    def __init__(
        self, key: ChunkKey, tier: Tier, pool: IoPool, deadline_s: float, hooks: Hooks
    ) -> None:
        super().__init__(tier.name, pool, deadline_s)
        # few reads of one chunk at a time, so that the early layers of all chunks of a request
        # come before the late layers of one; more where a round trip costs more than the bytes
        self._max_in_flight = 4 if tier.remote else 2
        self.key = key
        self.source: TierEntry | None = None  # these six belong to the store: what it is read from,
        self.users = 0  # leases that hold it,
        self.kept: TierEntry | None = None  # the object of the host tier it became,
        self.damaged = False  # what it is read from must go,
        self.put_aside = False  # and is gone,
        self.disposed = False  # its memory was given back
        self._tier = tier
        self._hooks = hooks
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

    def bytes_left(self) -> int:
        """What is still to come. Before the header is known: what the books say of its size."""
        with self._changed:
            header = self.header
            if self._failure is not None or self._cancelled:
                return 0
            if header is None:
                return 0 if self.source is None else self.source.size_bytes
            layers = zip(header.layers, self._ready, strict=True)
            extras = self._wanted & header.extras.keys() - self.held - self._lost.keys()
            left = [*(s for s, is_here in layers if not is_here), *map(header.extras.get, extras)]
            return sum(section.size_bytes for section in left if section is not None)

    def close_reader(self) -> None:
        """Called by the store when the arrival is idle for good."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _on_idle(self) -> None:
        self._hooks.idle(self)

    def _on_extra(self, name: str, data: memoryview) -> None:
        self._hooks.fill(self, name, data)

    def _on_lost(self, miss: Miss, detail: str) -> None:
        self._hooks.failed(self, miss, detail)

    def _on_failure(self, miss: Miss, detail: str) -> None:
        self._hooks.failed(self, miss, detail)

    def _open_reader(self) -> Reader | None:
        """None: the object is gone, and whoever waits knows."""
        self._reader = self._tier.open(self.key)
        if self._reader is None:
            self._fail(Miss.ABSENT, "it is gone")
        return self._reader

    def _open(self) -> None:
        reader = self._open_reader()
        if reader is None:
            return
        # small extras come along with the header, where any are wanted
        scratch = _thread_scratch()[: HEAD_BYTES if self._wanted - PROVENANCE else FRONT_BYTES]
        header, raw = read_head(reader, self.key, scratch)
        landing = self.landing = self._hooks.land(self, header)
        with self._changed:
            self._taken = frozenset(
                name for name in header.extras if landing.whole or name in self._wanted
            )
        damaged = self._take_front(reader, header, raw, landing.memory.view)
        with self._changed:
            self.front = self._taken
            self.held = self._taken - damaged.keys()
            self._lose(dict.fromkeys(damaged, Miss.CORRUPT))
            self._open_up(header)
            self._spans_left = self._order.plan(header, self._tier.best_read_bytes)
            num_jobs = self._due_jobs()
        if damaged:
            self._on_lost(Miss.CORRUPT, "; ".join(damaged.values()))
        self._launch_reads(num_jobs)
        self._launch_extras()

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

    def _read(self, span: ReadSpan) -> None:
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
