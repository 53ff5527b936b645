"""What lies where, and how it is moved: room, eviction, demotion, writing, deleting.

The half of the store that changes tiers. Budgets hold because bytes are reserved before they are
written and counted until they are really gone. One lock covers all books; no IO happens under it.

A key that leaves the host tier leaves its shelf in the same moment, under the lock. In lower tiers,
where both take IO, writing and removing one key take turns: a late delete never takes what a save
has just been told is kept.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from kvweave.errors import TierError
from kvweave.kv.config import StoreConfig
from kvweave.kv.keys import ChunkKey
from kvweave.kv.layout import Header
from kvweave.kv.memory import Memory
from kvweave.kv.objects import PackedChunk, verify_object
from kvweave.kv.places import Place
from kvweave.kv.shelf import Entry, Shelf
from kvweave.kv.tiers.host import HostTier
from kvweave.kv.usage import UsageBook
from kvweave.kv.writer import Ticket, Writer
from kvweave.metrics import Metrics

log = logging.getLogger(__name__)

_MAX_FOREIGN = 1 << 16  # remembered; beyond that they are found out anew
_TURN_S = 5.0  # how long to wait for a change of the same key in the same tier


class Host(NamedTuple):
    """The host tier with its parts at hand."""

    place: Place
    tier: HostTier
    shelf: Shelf


class Stock:
    """Thread-safe. Methods that say so expect `lock` to be held; all others take it themselves."""

    def __init__(self, cfg: StoreConfig, places: Sequence[Place], metrics: Metrics) -> None:
        self.lock = threading.Lock()
        self.usage = UsageBook()
        self.places = list(places)
        self.host = _host_of(self.places)
        self.below = self.places[1:] if self.host else self.places  # slower tiers, fastest first
        self._metrics = metrics
        self._changing: set[tuple[str, ChunkKey]] = set()  # being written or removed below the host
        self._turn = threading.Condition(self.lock)
        self.foreign: set[tuple[str, ChunkKey]] = set()  # (tier, key) that cannot be read here
        self._demoting: set[ChunkKey] = set()  # off the host tier, not yet with a writer
        self._demote_to = next((p for p in self.below if p.shelf is not None), None)
        self.writers = {
            place.name: Writer(
                place.name,
                cfg.write_behind_bytes,
                partial(self._write, place),
                cfg.write_deadline_s,
                partial(self._write_hangs, place, cfg.write_deadline_s),
            )
            for place in self.below
        }
        for place in self.below:
            self._take_stock(place)

    # ---- host memory

    def room_in_host(self, key: ChunkKey, size_bytes: int) -> Memory | None:
        """Host memory for an object that deserves it. None: it does not, or there is none."""
        if self.host is None:
            return None
        place, tier, shelf = self.host
        size = tier.footprint(size_bytes)
        for is_retry in (False, True):
            # free bytes in many holes are no room for one object: then evict its size once more
            ask = size + max(0, shelf.free_bytes) if is_retry else size
            if not self._make_room(place, key, ask):
                return None
            with self.lock:
                shelf.unreserve(ask - size)
                memory = tier.reserve(size_bytes)
                if memory is not None:
                    return memory
                shelf.unreserve(size)
        self._metrics.count("kv_admissions_refused_total", tier="host", reason="fragmented")
        return None

    def give_back_host(self, memory: Memory) -> None:
        """Return memory from `room_in_host` that did not become an object."""
        assert self.host is not None
        with self.lock:
            self.host.shelf.unreserve(self.host.tier.footprint(len(memory.view)))
            self.host.tier.cancel(memory)

    def shelve_in_host(self, key: ChunkKey, header: Header, memory: Memory) -> Entry | None:
        """Make filled host memory an object. None: the key is there already. Lock is held."""
        assert self.host is not None
        _, tier, shelf = self.host
        if shelf.revive(key) is not None:
            return None
        tier.keep(key, memory, header.total_bytes)
        size = tier.footprint(header.total_bytes)
        entry = shelf.add(key, size, self.usage.seen(key), reserved=True)
        entry.header, entry.memory = header, memory
        return entry

    def save_to_host(self, packed: PackedChunk) -> bool:
        """Copy an object into the host tier if it is worth its place. True: it is there."""
        if self.host is None:
            return False
        with self.lock:
            if self.host.shelf.revive(packed.key) is not None:
                return True
        memory = self.room_in_host(packed.key, packed.header.total_bytes)
        if memory is None:
            return False
        memory.view[:] = packed.view
        with self.lock:
            entry = self.shelve_in_host(packed.key, packed.header, memory)
        if entry is None:
            self.give_back_host(memory)
        return True

    # ---- lower tiers

    def count_dropped(self, place: Place, reason: str) -> None:
        self._metrics.count("kv_saves_dropped_total", tier=place.name, reason=reason)

    def _write(self, place: Place, packed: PackedChunk) -> bool:
        """Write one object to a tier below the host. Runs on that tier's writer thread."""
        with self._turn_of(place, packed.key) as is_mine:
            if is_mine:
                return self._write_in_turn(place, packed)
        self.count_dropped(place, "a delete hangs")
        return False

    def _write_in_turn(self, place: Place, packed: PackedChunk) -> bool:
        shelf, key, size = place.shelf, packed.key, packed.header.total_bytes
        if shelf is not None:
            with self.lock:
                is_foreign = (place.name, key) in self.foreign
                if not is_foreign and shelf.revive(key) is not None:
                    return True
            if is_foreign and self._remove_in_turn(place, key) is None:
                return False
        if not place.writes.allows():
            self.count_dropped(place, "tier rests after failures")
            return False
        if shelf is not None and not self._make_room(place, key, size):
            place.writes.succeeded()  # no room is no failure, should this have been the probe
            return False
        kept = False
        try:
            kept = place.tier.write(key, [packed.view])
        except TierError as error:
            self._metrics.count("kv_tier_errors_total", tier=place.name, verb="write")
            place.writes.failed(str(error))
        else:
            place.writes.succeeded()
            if not kept:
                self._say_full(place)
        if shelf is not None:
            with self.lock:
                if kept:
                    shelf.add(key, size, self.usage.seen(key), reserved=True)
                else:
                    shelf.unreserve(size)
        if kept:
            with self.lock:
                self.foreign.discard((place.name, key))
            self._metrics.count("kv_saves_total", tier=place.name)
        return kept

    def _write_hangs(self, place: Place, deadline_s: float) -> None:
        self._metrics.count("kv_tier_errors_total", tier=place.name, verb="write")
        place.writes.failed(f"a write takes longer than {deadline_s:g} s", at_once=True)

    def _say_full(self, place: Place) -> None:
        self.count_dropped(place, "no room")
        if self._metrics.value("kv_saves_dropped_total", tier=place.name, reason="no room") == 1:
            log.warning(
                "%s is full though its budget is not; free space there or lower capacity_bytes. "
                "Chunks that do not fit are computed again",
                place.name,
            )

    def _make_room(self, place: Place, key: ChunkKey, size_bytes: int) -> bool:
        """Reserve `size_bytes` in a tier, evicting what is worth less. May block on IO."""
        shelf = place.shelf
        assert shelf is not None
        leaving: list[tuple[ChunkKey, Memory]] = []
        with self.lock:
            if shelf.reserve(size_bytes):
                return True
            victims = shelf.evict_for(size_bytes, self.usage.seen(key))
            if self._is_host(place):
                leaving = self._detach([victim for victim, _ in victims or ()])
        if victims is None:
            self._metrics.count("kv_admissions_refused_total", tier=place.name, reason="worth less")
            return False
        if self._is_host(place):
            self._send_off(leaving)
        else:  # on the writer thread, the only one that writes there: nobody can save a victim now
            stuck = [v for v in victims if self.delete_quietly(place, v[0]) is None]
            if stuck:  # no room after all: what is still there stays on the books
                with self.lock:
                    shelf.settle(size_bytes, victims)
                    shelf.unreserve(size_bytes)
                    for victim, victim_bytes in stuck:
                        self._put_back(shelf, victim, victim_bytes)
                self.count_dropped(place, "cannot evict")
                return False
        self._metrics.count("kv_evictions_total", len(victims), tier=place.name)
        with self.lock:
            shelf.settle(size_bytes, victims)
        return True

    def _detach(self, keys: Sequence[ChunkKey]) -> list[tuple[ChunkKey, Memory]]:
        """Take victims out of the host tier; their bytes stay until `_send_off`. Lock is held."""
        assert self.host is not None
        leaving = [(key, self.host.tier.detach(key)) for key in keys]
        self._demoting.update(key for key in keys if self._demote_to and not self._is_below(key))
        return [(key, memory) for key, memory in leaving if memory is not None]

    def _send_off(self, leaving: Sequence[tuple[ChunkKey, Memory]]) -> None:
        """Write victims of the host tier down where needed, and free their memory."""
        assert self.host is not None
        for key, memory in leaving:
            self._demote(key, memory)
            self.host.tier.cancel(memory)

    def _is_below(self, key: ChunkKey) -> bool:
        """Whether a slower tier has a key or is about to, as far as the books say. What a remote
        tier has, no book says: it may drop anything any time. Lock is held."""
        shelved = [(p.shelf, self.writers[p.name]) for p in self.below if p.shelf is not None]
        return any(key in shelf or writer.pends(key) for shelf, writer in shelved)

    def _demote(self, key: ChunkKey, memory: Memory) -> None:
        """Write an object that left the host tier down. Copies it: its memory goes now."""
        target = self._demote_to
        if target is None or key not in self._demoting:
            return
        copy = PackedChunk.from_bytes(key, memory.view)
        with self.lock:
            if key not in self._demoting:
                return  # deleted while it was copied
            self._demoting.discard(key)
            is_taken = self.writers[target.name].offer(copy, Ticket(), wait_s=0.0)
        if is_taken:
            self._metrics.count("kv_demotions_total", tier=target.name)
        else:
            self.count_dropped(target, "write-behind is full")

    # ---- removing

    def unpin(self, place: Place, key: ChunkKey, entry: Entry) -> bool:
        """Take a lease's pin off. True: call `finish_delete`. Lock is held."""
        entry.pins -= 1
        assert entry.pins >= 0, "unpinned more often than pinned"
        assert place.shelf is not None
        return entry.pins == 0 and entry.doomed and place.shelf.has(key, entry)

    def delete_from(self, place: Place, key: ChunkKey) -> bool:
        """Remove a key from a tier, at once or with its last lease. True: it was there."""
        if self._is_host(place):
            with self.lock:
                return self.delete_from_host(key)
        with self._turn_of(place, key) as is_mine:
            if not is_mine:
                self._metrics.count("kv_tier_errors_total", tier=place.name, verb="delete")
                return False
            with self.lock:
                entry = place.shelf.find(key) if place.shelf is not None else None
                if entry is not None and entry.pins:
                    entry.doomed = True  # perhaps not for the first time
                    return True
            return bool(self._remove_in_turn(place, key))

    def delete_from_host(self, key: ChunkKey) -> bool:
        """Like `delete_from`, and whatever is on its way down stops. Lock is held."""
        self._demoting.discard(key)
        if self.host is None:
            return False
        entry = self.host.shelf.find(key)
        if entry is None:
            return False
        if entry.pins:
            entry.doomed = True
        else:
            self.host.tier.delete(key)
            self.host.shelf.unreserve(self.host.shelf.take_off(key))
        return True

    def finish_delete(self, place: Place, key: ChunkKey, entry: Entry) -> None:
        """A doomed entry lost its last pin."""
        assert place.shelf is not None
        with self._turn_of(place, key) as is_mine:
            if not is_mine:
                self._metrics.count("kv_tier_errors_total", tier=place.name, verb="delete")
                return
            with self.lock:
                if not place.shelf.has(key, entry) or entry.pins or not entry.doomed:
                    return  # revived by a save, or leased again before that
                if self._is_host(place):
                    self.delete_from_host(key)
                    return
            self._remove_in_turn(place, key)

    def _remove_in_turn(self, place: Place, key: ChunkKey) -> bool | None:
        """Take a key off the books and delete it. None: the tier failed; its bytes stay counted and
        are never served, and an eviction tries again."""
        with self.lock:
            size = self._take_off(place, key)
        was_here = self.delete_quietly(place, key)
        self._gone(place, size)
        if was_here is None and size and place.shelf is not None:
            with self.lock:
                self._put_back(place.shelf, key, size)
        return was_here

    def _put_back(self, shelf: Shelf, key: ChunkKey, size_bytes: int) -> None:
        """Book what could not be deleted, as good as gone. Lock is held."""
        if size_bytes <= shelf.free_bytes and key not in shelf:
            shelf.add(key, size_bytes, self.usage.seen(key), reserved=False).doomed = True

    def delete_quietly(self, place: Place, key: ChunkKey) -> bool | None:
        """Delete an object that is off the shelf. None: the tier failed, which is counted."""
        try:
            return place.tier.delete(key)
        except TierError as error:
            self._metrics.count("kv_tier_errors_total", tier=place.name, verb="delete")
            place.writes.failed(str(error))
            return None

    def quarantine(self, place: Place, key: ChunkKey, entry: Entry | None) -> None:
        """Take a damaged object off the books and out of sight. `entry` is what stood there when it
        was read: a copy saved since stays, and so does one that is whole when looked at again (it
        was replaced while it was read, or damaged on the way here)."""
        assert not self._is_host(place), "nothing arrives from the host tier"
        with self._turn_of(place, key) as is_mine:
            if not is_mine:
                self._metrics.count("kv_tier_errors_total", tier=place.name, verb="quarantine")
                return
            with self.lock:
                is_newer = entry is not None and not self._has(place, key, entry)
            if is_newer or self._is_whole(place, key):
                self._metrics.count("kv_quarantine_spared_total", tier=place.name)
                return
            with self.lock:
                size = self._take_off(place, key)
            try:
                if place.tier.quarantine(key):
                    self._metrics.count("kv_quarantined_total", tier=place.name)
            except TierError as error:
                self._metrics.count("kv_tier_errors_total", tier=place.name, verb="quarantine")
                place.writes.failed(str(error))
            self._gone(place, size)

    def _has(self, place: Place, key: ChunkKey, entry: Entry) -> bool:
        return place.shelf is not None and place.shelf.has(key, entry)

    def _is_whole(self, place: Place, key: ChunkKey) -> bool:
        """Whether an object that was found damaged is not, at a second look."""
        try:
            reader = place.tier.open(key)
            if reader is None:
                return False
            try:
                verify_object(reader, key)
            finally:
                reader.close()
        except TierError:
            return False
        return True

    def set_aside(self, place: Place, key: ChunkKey) -> bool:
        """Note that an object cannot be read here: nobody is sent to it any more, its bytes still
        count, and a save replaces it. True: this is the first one of this tier."""
        with self.lock:
            is_first = all(name != place.name for name, _ in self.foreign)
            if len(self.foreign) >= _MAX_FOREIGN:
                self.foreign.clear()
            self.foreign.add((place.name, key))
        return is_first

    def _take_off(self, place: Place, key: ChunkKey) -> int:
        """Off the shelf; give `_gone` the size when the bytes are. Lock is held."""
        is_here = place.shelf is not None and key in place.shelf
        return place.shelf.take_off(key) if is_here and place.shelf is not None else 0

    def _gone(self, place: Place, size_bytes: int) -> None:
        if place.shelf is not None and size_bytes:
            with self.lock:
                place.shelf.unreserve(size_bytes)

    def forget(self, place: Place, key: ChunkKey, entry: Entry | None) -> None:
        """Take an object that went away by itself off the books, leased or not. `entry` is what
        stood there when it was looked for: a copy saved since stays, or its bytes would lie on
        disk uncounted."""
        with self.lock:
            if place.shelf is not None and entry is not None and place.shelf.has(key, entry):
                place.shelf.unreserve(place.shelf.take_off(key))

    # ---- turns

    @contextmanager
    def _turn_of(self, place: Place, key: ChunkKey) -> Iterator[bool]:
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

    def _is_host(self, place: Place) -> bool:
        return self.host is not None and place is self.host.place

    # ---- books

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

    def _take_stock(self, place: Place) -> None:
        """Put what a tier holds from earlier on its shelf; evict what exceeds the budget."""
        if place.shelf is None:
            return
        try:
            found = sorted(place.tier.scan(), key=lambda o: o.written_s, reverse=True)
        except TierError as error:
            self._metrics.count("kv_tier_errors_total", tier=place.name, verb="scan")
            place.reads.failed(str(error), at_once=True)
            return
        surplus = []
        with self.lock:
            for each in found:  # newest first: the oldest are the ones that do not fit
                usage = self.usage.found(each.key, each.written_s, each.size_bytes)
                if each.size_bytes <= place.shelf.free_bytes:
                    place.shelf.add(each.key, each.size_bytes, usage, reserved=False)
                else:
                    surplus.append(each.key)
        for key in surplus:
            self.delete_quietly(place, key)
        if surplus:
            self._metrics.count("kv_evictions_total", len(surplus), tier=place.name)


def _host_of(places: Sequence[Place]) -> Host | None:
    if not places or not isinstance(places[0].tier, HostTier):
        assert not any(isinstance(p.tier, HostTier) for p in places), "the host tier comes first"
        return None
    assert places[0].shelf is not None, "the host tier has a budget"
    return Host(places[0], places[0].tier, places[0].shelf)
