"""Putting objects into tiers: room, eviction, demotion, writing.

With `Books`, `Removal` and `InHost` the half of the store that changes tiers; `Loads` reads.
"""

import logging
from collections.abc import Sequence
from functools import partial

from kvweave.errors import TierError
from kvweave.kv.config import StoreConfig
from kvweave.kv.forget import Provenance, provenance_in
from kvweave.kv.in_host import InHost
from kvweave.kv.keys import ChunkKey
from kvweave.kv.memory import Memory
from kvweave.kv.objects import PackedChunk
from kvweave.kv.places import Place
from kvweave.kv.shelf import Entry
from kvweave.kv.writer import Ticket, Writer
from kvweave.metrics import Metrics

log = logging.getLogger(__name__)


class Stock(InHost):
    """Thread-safe, see `Books`. One writer thread per tier below the host."""

    def __init__(self, cfg: StoreConfig, places: Sequence[Place], metrics: Metrics) -> None:
        super().__init__(places, metrics)
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

    def may_lack_extras(self, key: ChunkKey) -> bool:
        """Whether host memory may hold a chunk in part. Not one that no local tier below has: it
        may have to be written there one day."""
        with self.lock:
            return self._demote_to is None or self._is_below(key)

    def save_to_host(self, packed: PackedChunk) -> bool:
        """Copy an object into the host tier if it is worth its place. True: it is there."""
        if self.host is None:
            return False
        with self.lock:
            entry = self.host.shelf.revive(packed.key)
            if entry is not None:
                self.complete_from(packed, entry)
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
                if not is_foreign and (entry := shelf.revive(key)) is not None:
                    self._note_written(entry, packed)
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
                    entry = shelf.add(key, size, self.usage.seen(key), reserved=True)
                    self._note_written(entry, packed)
                else:
                    shelf.unreserve(size)
        if kept:
            with self.lock:
                self.foreign.discard((place.name, key))
            self._metrics.count("kv_saves_total", tier=place.name)
        return kept

    def _note_written(self, entry: Entry, packed: PackedChunk) -> None:
        """Lock is held."""
        entry.since, entry.of = self.gone.now, provenance_in(packed.header, packed.memory)

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
        for key in keys:
            if self._demote_to is None or self._is_below(key):
                continue
            if self.host.tier.is_whole(key):
                self._demoting.add(key)
            else:  # the tier it came from lost it since: half an object is never written down
                self.count_dropped(self._demote_to, "in part")
        leaving = [(key, self.host.tier.detach(key)) for key in keys]
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

    def written(self) -> list[tuple[ChunkKey, Provenance]]:
        """Whose text the objects are that this process has written below the host tier, or is about
        to write. What is on its way there and with no writer yet is not written at all: nobody can
        say whose it is. Lock is held."""
        self._demoting.clear()
        shelves = [place.shelf for place in self.below if place.shelf is not None]
        entries = [(key, shelf.find(key)) for shelf in shelves for key in shelf]
        of = [(key, entry.of) for key, entry in entries if entry is not None]
        for writer in self.writers.values():
            of += [(p.key, provenance_in(p.header, p.memory)) for p in writer.pending()]
        return [(key, each) for key, each in of if each is not None]

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
