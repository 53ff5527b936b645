"""What lies where: the books of all tiers, under one lock.

Budgets hold because bytes are reserved before they are written and counted until they are really
gone. No IO happens under the lock. In lower tiers, where writing and removing take IO, changes of
one key take turns: a late delete never takes what a save has just been told is kept.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvweave.kv.gone import Gone
from kvweave.kv.keys import ChunkKey, ContextId, context_of
from kvweave.kv.places import TierSlot
from kvweave.kv.tier_budget import TierBudget, TierEntry
from kvweave.kv.tiers.host import HostTier
from kvweave.kv.usage import UsageBook
from kvweave.metrics import Metrics

_TURN_S = 5.0  # how long to wait for a change of the same key in the same tier


class Host(NamedTuple):
    """The host tier with its parts at hand."""

    place: TierSlot
    tier: HostTier
    shelf: TierBudget


class Books:
    """Thread-safe. Methods that say so expect `lock` to be held; all others take it themselves."""

    def __init__(self, places: Sequence[TierSlot], metrics: Metrics) -> None:
        self.lock = threading.Lock()
        self.usage = UsageBook()
        self.places = list(places)
        self.host = _host_of(self.places)
        self.below = self.places[1:] if self.host else self.places  # slower tiers, fastest first
        self.gone = Gone()
        self.foreign: set[tuple[str, ChunkKey]] = set()  # (tier, key) that cannot be read here
        self._metrics = metrics
        self._changing: set[tuple[str, ChunkKey]] = set()  # being written or removed below the host
        self._turn = threading.Condition(self.lock)
        self._demoting: set[ChunkKey] = set()  # off the host tier, not yet with a writer

    def count_dropped(self, place: TierSlot, reason: str) -> None:
        self._metrics.count("kv_saves_dropped_total", tier=place.name, reason=reason)

    def give_way(self, context: ContextId) -> None:
        """See `KVStore.give_way`."""
        with self.lock:
            self.usage.give_way(context)
            for shelf in [place.shelf for place in self.places if place.shelf is not None]:
                for key in [key for key in shelf if context_of(key) == context]:
                    shelf.touch(key, self.usage.seen(key))

    def unpin(self, place: TierSlot, key: ChunkKey, entry: TierEntry) -> bool:
        """Take a lease's pin off. True: call `finish_delete`. Lock is held."""
        entry.pins -= 1
        assert entry.pins >= 0, "unpinned more often than pinned"
        assert place.shelf is not None
        return entry.pins == 0 and entry.doomed and place.shelf.has(key, entry)

    def _put_back(self, shelf: TierBudget, key: ChunkKey, size_bytes: int) -> None:
        """Book what could not be deleted, as good as gone. Lock is held."""
        if size_bytes <= shelf.free_bytes and key not in shelf:
            shelf.add(key, size_bytes, self.usage.seen(key), reserved=False).doomed = True

    def _has(self, place: TierSlot, key: ChunkKey, entry: TierEntry) -> bool:
        return place.shelf is not None and place.shelf.has(key, entry)

    def _take_off(self, place: TierSlot, key: ChunkKey) -> int:
        """Off the shelf; give `_gone` the size when the bytes are. Lock is held."""
        is_here = place.shelf is not None and key in place.shelf
        return place.shelf.take_off(key) if is_here and place.shelf is not None else 0

    def _gone(self, place: TierSlot, size_bytes: int) -> None:
        if place.shelf is not None and size_bytes:
            with self.lock:
                place.shelf.unreserve(size_bytes)

    @contextmanager
    def _turn_of(self, place: TierSlot, key: ChunkKey) -> Iterator[bool]:
        """The only change of this key in this tier while it lasts. False: another one hangs."""
        name = (place.name, key)
        with self.lock:
            is_mine = self._turn.wait_for(lambda: name not in self._changing, _TURN_S)
            if is_mine:
                self._changing.add(name)
        try:
            yield is_mine
        finally:
            if is_mine:
                with self.lock:
                    self._changing.discard(name)
                    self._turn.notify_all()

    def _is_host(self, place: TierSlot) -> bool:
        return self.host is not None and place is self.host.place

    def check_integrity(self) -> None:
        """Raise AssertionError if books and tiers disagree."""
        with self.lock:
            for place in self.places:
                if place.shelf is None:
                    continue
                place.shelf.check_integrity()
                listed = {found.key for found in place.tier.scan()}
                lost = [key for key in place.shelf if key not in listed]
                assert not lost, f"{place.name} lost {len(lost)} objects that are on its shelf"
            if self.host is not None:
                self.host.tier.check_integrity()
                kept = sum(1 for _ in self.host.tier.scan())
                assert kept == len(self.host.shelf), "the host tier has objects off the shelf"


def _host_of(places: Sequence[TierSlot]) -> Host | None:
    if not places or not isinstance(places[0].tier, HostTier):
        assert not any(isinstance(p.tier, HostTier) for p in places), "the host tier comes first"
        return None
    assert places[0].shelf is not None, "the host tier has a budget"
    return Host(places[0], places[0].tier, places[0].shelf)
