"""Taking objects out of tiers: deleting, quarantine, and setting aside what cannot be read here.

A key that leaves the host tier leaves its shelf in the same moment, under the lock. Below, a key is
off the shelf first and its bytes count until they are really gone.
"""

from kvweave.errors import TierError
from kvweave.kv.books import Books
from kvweave.kv.format.objects import verify_object
from kvweave.kv.keys import ChunkKey
from kvweave.kv.places import TierSlot
from kvweave.kv.tier_budget import TierEntry

_MAX_FOREIGN = 1 << 16  # remembered; beyond that they are found out anew


class Removal(Books):
    """The books, and how objects leave them. Trouble in a tier is counted, never raised."""

    def delete_from(self, place: TierSlot, key: ChunkKey) -> bool:
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

    def finish_delete(self, place: TierSlot, key: ChunkKey, entry: TierEntry) -> None:
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

    def _remove_in_turn(self, place: TierSlot, key: ChunkKey) -> bool | None:
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

    def delete_quietly(self, place: TierSlot, key: ChunkKey) -> bool | None:
        """Delete an object that is off the shelf. None: the tier failed, which is counted."""
        try:
            return place.tier.delete(key)
        except TierError as error:
            self._metrics.count("kv_tier_errors_total", tier=place.name, verb="delete")
            place.writes.failed(str(error))
            return None

    def quarantine(self, place: TierSlot, key: ChunkKey, entry: TierEntry | None) -> None:
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

    def _is_whole(self, place: TierSlot, key: ChunkKey) -> bool:
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

    def set_aside(self, place: TierSlot, key: ChunkKey) -> bool:
        """Note that an object cannot be read here: nobody is sent to it any more, its bytes still
        count, and a save replaces it. True: this is the first one of this tier."""
        with self.lock:
            is_first = all(name != place.name for name, _ in self.foreign)
            if len(self.foreign) >= _MAX_FOREIGN:
                self.foreign.clear()
            self.foreign.add((place.name, key))
        return is_first

    def confirm(self, place: TierSlot, key: ChunkKey) -> None:
        """Ask a tier whether it still has what its shelf says, and forget what it has not."""
        assert place.shelf is not None
        with self.lock:
            entry = place.shelf.find(key)
        try:
            is_gone = entry is not None and place.tier.size(key) is None
        except TierError:
            return  # whoever reads it finds out
        if is_gone:
            self.forget(place, key, entry)

    def forget(self, place: TierSlot, key: ChunkKey, entry: TierEntry | None) -> None:
        """Take an object that went away by itself off the books, leased or not. `entry` is what
        stood there when it was looked for: a copy saved since stays, or its bytes would lie on
        disk uncounted."""
        with self.lock:
            if place.shelf is not None and entry is not None and place.shelf.has(key, entry):
                place.shelf.unreserve(place.shelf.take_off(key))
