"""Write-behind: saving returns at once, threads of a tier write, a byte bound keeps it honest."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import PackedChunk

log = logging.getLogger(__name__)


class SaveTicket:
    """A promise about one saved object. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = 1  # tiers that have not answered yet; the store itself counts as one
        self._kept: list[str] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until every tier answered. True: at least one tier that outlives this process has
        the object; without such a tier, at least one tier has it."""
        with self._changed:
            answered = self._changed.wait_for(lambda: self._open == 0, timeout_s)
            return answered and bool(self._kept)

    @property
    def is_answered(self) -> bool:
        """Every tier has said whether it has the object."""
        with self._changed:
            return self._open == 0

    def expect(self) -> None:
        with self._changed:
            self._open += 1

    def answer(self, tier: str | None) -> None:
        """Note the answer of one tier; None if it does not have the object."""
        with self._changed:
            self._open -= 1
            if tier is not None:
                self._kept.append(tier)
            if self._open == 0:
                self._changed.notify_all()


class _Pending(NamedTuple):
    packed: PackedChunk
    ticket: SaveTicket


class Writer:
    """Threads that save objects to one tier, oldest first; those of one key one after the other.
    `write` does the work and says whether the tier has the object; one that raises is a bug, and
    does not have it. If it takes longer than `deadline_s` it hangs: until it returns nothing more
    is taken, `on_hang` hears of it once."""

    def __init__(
        self,
        name: str,
        max_pending_bytes: int,
        write: Callable[[PackedChunk], bool],
        deadline_s: float = 60.0,
        on_hang: Callable[[], None] | None = None,
        on_bug: Callable[[], None] | None = None,
        num_threads: int = 1,
    ) -> None:
        """`on_bug` hears of a `write` that raised. `num_threads` write at the same time at most."""
        self._name = name
        self._on_bug = on_bug
        self._deadline_s = deadline_s
        self._on_hang = on_hang
        self._said_so = False  # that it hangs
        self._max_pending_bytes = max_pending_bytes
        self._write = write
        self._changed = threading.Condition()
        self._queue: deque[_Pending] = deque()
        self._pending_bytes = 0  # queued and being written
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._writing: dict[ChunkKey, tuple[PackedChunk, float]] = {}  # and when that began
        self._closed = False

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    def pends(self, key: ChunkKey) -> bool:
        """Whether a write of this key is queued or under way."""
        with self._changed:
            return any(packed.key == key for packed in self.pending())

    def pending(self) -> list[PackedChunk]:
        """Objects that are queued or being written."""
        with self._changed:
            under_way = [packed for packed, _ in self._writing.values()]
            return [*under_way, *(each.packed for each in self._queue)]

    def offer(self, packed: PackedChunk, ticket: SaveTicket, *, wait_s: float) -> bool:
        """Queue a write. False: the bound is reached and stayed so for `wait_s`, or a write hangs,
        or closed.

        An object larger than the bound is taken when nothing else is pending.
        """
        size = packed.header.total_bytes
        give_up_s = time.monotonic() + wait_s
        with self._changed:
            while not self._has_room(size):
                left_s = give_up_s - time.monotonic()
                if self._closed or self.hangs() or left_s <= 0:
                    break
                self._changed.wait(min(left_s, 1.0))
            is_news = self.hangs() and not self._said_so
            self._said_so |= is_news
        if is_news and self._on_hang is not None:
            self._on_hang()
        with self._changed:
            if self._closed or self.hangs() or not self._has_room(size):
                return False
            ticket.expect()
            self._queue.append(_Pending(packed, ticket))
            self._pending_bytes += size
            if len(self._threads) < min(self._num_threads, len(self._writing) + len(self._queue)):
                name = f"kv-{self._name}-writer"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify_all()
        return True

    def hangs(self) -> bool:
        """Whether a write under way has taken longer than it may."""
        began_s = [began_s for _, began_s in list(self._writing.values())]
        return time.monotonic() - min(began_s, default=math.inf) > self._deadline_s

    def _has_room(self, size_bytes: int) -> bool:
        fits = self._pending_bytes + size_bytes <= self._max_pending_bytes
        return fits or self._pending_bytes == 0

    def forget(self, key: ChunkKey, wait_s: float = 5.0) -> None:
        """Drop queued writes of a key that is about to be deleted, and wait for one under way."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._writing, wait_s)
            dropped = [p for p in self._queue if p.packed.key == key]
            self._queue = deque(p for p in self._queue if p.packed.key != key)
            self._pending_bytes -= sum(p.packed.header.total_bytes for p in dropped)
            self._changed.notify_all()
        for pending in dropped:
            pending.ticket.answer(None)

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is pending. False: the tier is too slow for that."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending_bytes == 0, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what is queued for at most `timeout_s`, refuse the rest, and stop."""
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            left = list(self._queue)
            self._queue.clear()
            self._pending_bytes -= sum(pending.packed.header.total_bytes for pending in left)
            self._changed.notify_all()
        for pending in left:
            pending.ticket.answer(None)
        give_up_s = time.monotonic() + max(0.1, min(1.0, timeout_s))
        for thread in self._threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))

    def _next(self) -> _Pending | None:
        """Take the oldest write whose key no other thread is at. Lock is held."""
        found = next((each for each in self._queue if each.packed.key not in self._writing), None)
        if found is not None:
            self._queue.remove(found)
        return found

    def _run(self) -> None:
        while True:
            with self._changed:
                while (pending := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                key = pending.packed.key
                self._writing[key] = pending.packed, time.monotonic()
                self._said_so = self._said_so and self.hangs()
            kept = False
            try:
                kept = self._write(pending.packed)
            except Exception:  # the thread stays: later saves would wait for it for ever
                log.exception("a write to %s failed, which is a bug", self._name)
                if self._on_bug is not None:
                    self._on_bug()
            finally:
                pending.ticket.answer(self._name if kept else None)
                with self._changed:
                    del self._writing[key]
                    self._pending_bytes -= pending.packed.header.total_bytes
                    self._changed.notify_all()
                del pending  # free its memory before waiting for the next
