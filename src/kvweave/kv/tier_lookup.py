"""Asking tiers without an index (remote ones, or a folder others write to) whether they have keys,
for no longer than a deadline.

Questions have threads of their own: behind the reads of a busy tier they would wait past any
deadline, and a tier that is merely busy would count as broken.
"""

import threading
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvweave.errors import TierError
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.inventory import TierSlot
from kvweave.kv.io_pool import IoPool
from kvweave.metrics import Metrics

_MEMO_S = 2.0  # an answer is good for this long: a plan's peek and the acquire that follows it
_THREADS = 4  # per tier


class Located(NamedTuple):
    slot: TierSlot
    size_bytes: int


class Locator:
    """Thread-safe. The answers it remembers for a moment are no promise: objects may go away."""

    def __init__(self, deadline_s: float, metrics: Metrics) -> None:
        self._deadline_s = deadline_s
        self._metrics = metrics
        self._lock = threading.Lock()
        self._memo: dict[tuple[str, ChunkKey], tuple[float, int | None]] = {}
        self._pools: dict[str, IoPool] = {}

    def locate(
        self,
        slots: Sequence[TierSlot],
        keys: Sequence[ChunkKey],
        skip: Collection[tuple[str, ChunkKey]] = (),
    ) -> dict[ChunkKey, Located]:
        """The first of `slots`, in order, that has each key. Keys that no tier has are left out;
        `skip` names (tier, key) that are of no use."""
        found: dict[ChunkKey, Located] = {}
        for slot in slots:
            unknown = [key for key in keys if key not in found and (slot.name, key) not in skip]
            for key, size in self._sizes(slot, unknown).items():
                found[key] = Located(slot, size)
        return found

    def forget(self, key: ChunkKey) -> None:
        with self._lock:
            for memo in [m for m in self._memo if m[1] == key]:
                del self._memo[memo]

    def close(self) -> None:
        """A question that hangs is left behind."""
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.close(0.1)

    def _pool_of(self, slot: TierSlot) -> IoPool:
        with self._lock:
            if slot.name not in self._pools:
                on_bug = slot.pool.on_bug  # counted like the tier's other bugs
                self._pools[slot.name] = IoPool(f"{slot.name}-locate", _THREADS, on_bug)
            return self._pools[slot.name]

    def _gets_on(self, slot: TierSlot) -> bool:
        """Whether a tier that left questions open still does something: it is slow, not broken."""
        answered_s = self._pool_of(slot).stalled_s()
        read_s = slot.pool.stalled_s()
        # a pool without jobs has not stalled at all, which says nothing about its tier
        return any(0.0 < stalled_s < self._deadline_s for stalled_s in (answered_s, read_s))

    def _sizes(self, slot: TierSlot, keys: Sequence[ChunkKey]) -> dict[ChunkKey, int]:
        sizes: dict[ChunkKey, int] = {}
        asked: list[ChunkKey] = []
        now_s = time.monotonic()
        with self._lock:
            for key in keys:
                until_s, size = self._memo.get((slot.name, key), (0.0, None))
                if until_s < now_s:
                    asked.append(key)
                elif size is not None:
                    sizes[key] = size
        if not asked or not slot.reads.allows():
            return sizes
        inquiry = _Inquiry(slot, asked)
        for key in asked:
            self._pool_of(slot).submit(lambda key=key: inquiry.ask(key))  # type: ignore[misc]
        answers, trouble = inquiry.wait(self._deadline_s)
        is_open = len(answers) < len(asked)
        if trouble is None or (is_open and self._gets_on(slot)):
            slot.reads.record_success()
        else:
            self._metrics.count("kv_tier_errors_total", tier=slot.name, verb="size")
            slot.reads.record_failure(trouble, at_once=is_open)
        until_s = time.monotonic() + _MEMO_S
        with self._lock:
            if len(self._memo) > 1 << 16:
                self._memo.clear()
            for key, size in answers.items():
                if size is not None:
                    sizes[key] = size
                    self._memo[slot.name, key] = (until_s, size)
        return sizes


class _Inquiry:
    """One question to one tier about several keys, answered by its IO threads."""

    def __init__(self, slot: TierSlot, keys: Sequence[ChunkKey]) -> None:
        self._place = slot
        self._changed = threading.Condition()
        self._waiting = len(keys)
        self._answers: dict[ChunkKey, int | None] = {}
        self._trouble: str | None = None

    def ask(self, key: ChunkKey) -> None:
        size: int | None = None
        trouble: str | None = None
        try:
            if self._trouble is None:  # after one failure the rest would only fail as well
                size = self._place.tier.size(key)
        except TierError as error:
            trouble = str(error)
        with self._changed:
            self._trouble = self._trouble or trouble
            self._answers[key] = size
            self._waiting -= 1
            self._changed.notify_all()

    def wait(self, deadline_s: float) -> tuple[dict[ChunkKey, int | None], str | None]:
        """Answers so far, and what went wrong if anything did."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting == 0, deadline_s):
                self._trouble = f"no answer within {deadline_s:g} s; check the server and network"
            return dict(self._answers), self._trouble
