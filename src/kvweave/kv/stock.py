"""Putting objects into tiers, at once or behind the caller's back.

With `Books`, `Removal`, `InHost` and `MakingRoom` the half of the store that changes tiers; `Loads`
reads.
"""

import logging
from collections.abc import Sequence
from functools import partial

from kvweave.errors import TierError
from kvweave.kv.config import StoreConfig
from kvweave.kv.format.objects import PackedChunk
from kvweave.kv.keys import ChunkKey
from kvweave.kv.making_room import MakingRoom
from kvweave.kv.places import TierSlot
from kvweave.kv.provenance import Provenance, provenance_in
from kvweave.kv.tier_budget import TierEntry
from kvweave.kv.writer import Writer
from kvweave.metrics import Metrics

log = logging.getLogger(__name__)


class Stock(MakingRoom):
    """Thread-safe, see `Books`. One writer thread per tier below the host."""

    def __init__(self, cfg: StoreConfig, places: Sequence[TierSlot], metrics: Metrics) -> None:
        super().__init__(places, metrics)
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

    def _write(self, place: TierSlot, packed: PackedChunk) -> bool:
        """Write one object to a tier below the host. Runs on that tier's writer thread."""
        with self._turn_of(place, packed.key) as is_mine:
            if is_mine:
                return self._write_in_turn(place, packed)
        self.count_dropped(place, "a delete hangs")
        return False

    def _write_in_turn(self, place: TierSlot, packed: PackedChunk) -> bool:
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

    def _note_written(self, entry: TierEntry, packed: PackedChunk) -> None:
        """Lock is held."""
        entry.since, entry.of = self.gone.now, provenance_in(packed.header, packed.memory)

    def _write_hangs(self, place: TierSlot, deadline_s: float) -> None:
        self._metrics.count("kv_tier_errors_total", tier=place.name, verb="write")
        place.writes.failed(f"a write takes longer than {deadline_s:g} s", at_once=True)

    def _say_full(self, place: TierSlot) -> None:
        self.count_dropped(place, "no room")
        if self._metrics.value("kv_saves_dropped_total", tier=place.name, reason="no room") == 1:
            log.warning(
                "%s is full though its budget is not; free space there or lower capacity_bytes. "
                "Chunks that do not fit are computed again",
                place.name,
            )

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

    def _take_stock(self, place: TierSlot) -> None:
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
