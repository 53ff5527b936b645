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
from kvweave.kv.io_pool import IoPool
from kvweave.kv.keys import ChunkKey
from kvweave.kv.places import TierSlot
from kvweave.metrics import Metrics

_MEMO_S = 2.0  # an answer is good for this long: a plan's peek and the acquire that follows it
_THREADS = 4  # per tier


class Located(NamedTuple):
    place: TierSlot
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
        places: Sequence[TierSlot],
        keys: Sequence[ChunkKey],
        skip: Collection[tuple[str, ChunkKey]] = (),
    ) -> dict[ChunkKey, Located]:
        """The first of `places`, in order, that has each key. Keys nobody has are left out, and
        `skip` names (tier, key) that are of no use."""
        found: dict[ChunkKey, Located] = {}
        for place in places:
            unknown = [key for key in keys if key not in found and (place.name, key) not in skip]
            for key, size in self._sizes(place, unknown).items():
                found[key] = Located(place, size)
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

    def _pool_of(self, place: TierSlot) -> IoPool:
        with self._lock:
            if place.name not in self._pools:
                pool = self._pools[place.name] = IoPool(f"{place.name}-locate", _THREADS)
                pool.on_bug = place.pool.on_bug  # counted like the tier's other bugs
            return self._pools[place.name]

    def _gets_on(self, place: TierSlot) -> bool:
        """Whether a tier that left questions open still does something: it is slow, not broken."""
        answered_s = self._pool_of(place).stalled_s()
        read_s = place.pool.stalled_s()
        # a pool without jobs has not stalled at all, which says nothing about its tier
        return any(0.0 < stalled_s < self._deadline_s for stalled_s in (answered_s, read_s))

    def _sizes(self, place: TierSlot, keys: Sequence[ChunkKey]) -> dict[ChunkKey, int]:
        sizes: dict[ChunkKey, int] = {}
        asked: list[ChunkKey] = []
        now_s = time.monotonic()
        with self._lock:
            for key in keys:
                until_s, size = self._memo.get((place.name, key), (0.0, None))
                if until_s < now_s:
                    asked.append(key)
                elif size is not None:
                    sizes[key] = size
        if not asked or not place.reads.allows():
            return sizes
        inquiry = _Inquiry(place, asked)
        for key in asked:
            self._pool_of(place).submit(lambda key=key: inquiry.ask(key))  # type: ignore[misc]
        answers, trouble = inquiry.wait(self._deadline_s)
        is_open = len(answers) < len(asked)
        if trouble is None or (is_open and self._gets_on(place)):
            place.reads.succeeded()
        else:
            self._metrics.count("kv_tier_errors_total", tier=place.name, verb="size")
            place.reads.failed(trouble, at_once=is_open)
        until_s = time.monotonic() + _MEMO_S
        with self._lock:
            if len(self._memo) > 1 << 16:
                self._memo.clear()
            for key, size in answers.items():
                if size is not None:
                    sizes[key] = size
                    self._memo[place.name, key] = (until_s, size)
        return sizes


class _Inquiry:
    """One question to one tier about several keys, answered by its IO threads."""

    def __init__(self, place: TierSlot, keys: Sequence[ChunkKey]) -> None:
        self._place = place
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
