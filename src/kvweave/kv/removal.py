"""Taking objects out of tiers: deleting, quarantine, and setting aside what cannot be read here.

A key that leaves the host tier leaves its books in the same moment, under the lock. Below, a key is
off the books first and its bytes count until they are really gone.
"""

import threading
from collections.abc import Callable

from kvweave.errors import TierError
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import verify_object
from kvweave.kv.inventory import Inventory
from kvweave.kv.tier_slot import IoPool, TierEntry, TierSlot

DELETE_S = 10.0  # a delete that takes longer hangs: it goes on by itself, nobody waits for it
_MAX_FOREIGN = 1 << 16  # remembered; beyond that they are found out anew


class Remover:
    """How objects leave tiers. Thread-safe; takes the inventory's lock where it is not said to be
    held. Trouble in a tier is counted, never raised."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._lock = inventory.lock
        self._host = inventory.host
        self._metrics = inventory.metrics
        self._pools: dict[str, IoPool] = {}  # of tiers that were deleted from, guarded by the lock

    def close(self) -> None:
        """A delete that hangs is left behind."""
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.close(1.0)

    def delete_from(self, slot: TierSlot, key: ChunkKey) -> bool:
        """Remove a key from a tier, at once or with its last lease. True: it was there."""
        if self._inventory.is_host(slot):
            with self._lock:
                return self.delete_from_host(key)
        return bool(self._in_time(slot, lambda: self._delete_below(slot, key)))

    def clean(self, slot: TierSlot, work: Callable[[], None]) -> None:
        """Have `work` delete in a lower tier what no book knows of. Raises what it raises, and
        TierError where it hangs: then it goes on by itself, and deletes behind it wait."""
        raised: list[OSError | TierError] = []

        def run() -> bool:
            try:
                work()
            except (OSError, TierError) as error:
                raised.append(error)
            return True

        if self._in_time(slot, run) is None:
            raise TierError(f"a delete in {slot.tier.place} takes longer than {DELETE_S:g} s")
        if raised:
            raise raised[0]

    def _in_time(self, slot: TierSlot, work: Callable[[], bool | None]) -> bool | None:
        """What `work` says, which changes a lower tier. None: it hangs, and whoever waits for it
        (a request, the engine) goes on without; it keeps its turn until it is through."""
        with self._lock:
            if slot.name not in self._pools:
                self._pools[slot.name] = IoPool(f"{slot.name}-delete", 1, slot.pool.on_bug)
            pool = self._pools[slot.name]
        is_over, said = threading.Event(), list[bool | None]()

        def run() -> None:
            try:
                said.append(work())
            finally:
                is_over.set()

        if not pool.submit(run):  # closed: the last leases go with the store
            return work()
        hangs = pool.stalled_s() > DELETE_S  # one before it does
        if is_over.wait(0.0 if hangs else DELETE_S):
            return said[0] if said else None
        self._metrics.count("kv_tier_errors_total", tier=slot.name, verb="delete")
        slot.writes.record_failure(f"a delete takes longer than {DELETE_S:g} s", at_once=True)
        return None

    def _delete_below(self, slot: TierSlot, key: ChunkKey) -> bool:
        with self._inventory.turn_of(slot, key) as is_mine:
            if not is_mine:
                self._metrics.count("kv_tier_errors_total", tier=slot.name, verb="delete")
                return False
            with self._lock:
                entry = slot.budget.find(key) if slot.budget is not None else None
                if entry is not None and entry.pins:
                    entry.doomed = True  # perhaps not for the first time
                    return True
            return bool(self.remove_in_turn(slot, key))

    def delete_from_host(self, key: ChunkKey) -> bool:
        """Like `delete_from`, and whatever is on its way down stops. Lock is held."""
        self._inventory.leaving.discard(key)
        if self._host is None:
            return False
        entry = self._host.budget.find(key)
        if entry is None:
            return False
        if entry.pins:
            entry.doomed = True
        else:
            self._host.tier.delete(key)
            self._host.budget.unreserve(self._host.budget.take_off(key))
        return True

    def empty_host(self) -> None:
        """Nothing is to be found in the host tier any more; what a lease holds goes with it."""
        if self._host is not None:
            with self._lock:
                for key in list(self._host.budget):
                    self.delete_from_host(key)

    def finish_delete(self, slot: TierSlot, key: ChunkKey, entry: TierEntry) -> None:
        """A doomed entry lost its last pin."""
        if self._inventory.is_host(slot):
            self._finish_delete(slot, key, entry)
        else:
            self._in_time(slot, lambda: self._finish_delete(slot, key, entry))

    def _finish_delete(self, slot: TierSlot, key: ChunkKey, entry: TierEntry) -> None:
        assert slot.budget is not None
        with self._inventory.turn_of(slot, key) as is_mine:
            if not is_mine:
                self._metrics.count("kv_tier_errors_total", tier=slot.name, verb="delete")
                return
            with self._lock:
                if not slot.budget.has(key, entry) or entry.pins or not entry.doomed:
                    return  # revived by a save, or leased again before that
                if self._inventory.is_host(slot):
                    self.delete_from_host(key)
                    return
            self.remove_in_turn(slot, key)

    def remove_in_turn(self, slot: TierSlot, key: ChunkKey) -> bool | None:
        """Take a key off the books and delete it. The caller has its turn. None: the tier failed;
        its bytes stay counted and are never served, and an eviction tries again."""
        with self._lock:
            size = self._inventory.take_off(slot, key)
            if not slot.is_booked:
                slot.unbooked_deletes.add(key)
        was_here = self.delete_quietly(slot, key)
        self._inventory.release_bytes(slot, size)
        if was_here is None and size and slot.budget is not None:
            with self._lock:
                self._inventory.put_back(slot.budget, key, size)
        return was_here

    def delete_quietly(self, slot: TierSlot, key: ChunkKey) -> bool | None:
        """Delete an object that is off the books. None: the tier failed, which is counted."""
        try:
            return slot.tier.delete(key)
        except TierError as error:
            self._metrics.count("kv_tier_errors_total", tier=slot.name, verb="delete")
            slot.writes.record_failure(str(error))
            return None

    def quarantine(self, slot: TierSlot, key: ChunkKey, entry: TierEntry | None) -> None:
        """Take a damaged object off the books and out of sight. `entry` is what stood there when it
        was read: a copy saved since stays, and so does one that is whole when looked at again (it
        was replaced while it was read, or damaged on the way here)."""
        assert not self._inventory.is_host(slot), "nothing arrives from the host tier"
        with self._inventory.turn_of(slot, key) as is_mine:
            if not is_mine:
                self._metrics.count("kv_tier_errors_total", tier=slot.name, verb="quarantine")
                return
            with self._lock:
                budget = slot.budget
                is_newer = entry is not None and (budget is None or not budget.has(key, entry))
            if is_newer or self._is_whole(slot, key):
                self._metrics.count("kv_quarantine_spared_total", tier=slot.name)
                return
            with self._lock:
                size = self._inventory.take_off(slot, key)
            try:
                if slot.tier.quarantine(key):
                    self._metrics.count("kv_quarantined_total", tier=slot.name)
            except TierError as error:
                self._metrics.count("kv_tier_errors_total", tier=slot.name, verb="quarantine")
                slot.writes.record_failure(str(error))
            self._inventory.release_bytes(slot, size)

    def _is_whole(self, slot: TierSlot, key: ChunkKey) -> bool:
        """Whether an object that was found damaged is not, at a second look."""
        try:
            reader = slot.tier.open(key)
            if reader is None:
                return False
            try:
                verify_object(reader, key)
            finally:
                reader.close()
        except TierError:
            return False
        return True

    def set_aside(self, slot: TierSlot, key: ChunkKey) -> bool:
        """Note that an object cannot be read here: no request is sent to it any more, its bytes
        still count, and a save replaces it. True: this is the first one of this tier."""
        foreign = self._inventory.foreign
        with self._lock:
            is_first = all(name != slot.name for name, _ in foreign)
            if len(foreign) >= _MAX_FOREIGN:
                foreign.clear()
            foreign.add((slot.name, key))
        return is_first

    def confirm(self, slot: TierSlot, key: ChunkKey) -> None:
        """Ask a tier whether it still has what its books say, and forget what it has not."""
        assert slot.budget is not None
        with self._lock:
            entry = slot.budget.find(key)
        if entry is not None and self._in_time(slot, lambda: self._is_gone(slot, key)):
            self.forget(slot, key, entry)

    def _is_gone(self, slot: TierSlot, key: ChunkKey) -> bool:
        try:
            return slot.tier.size(key) is None
        except TierError:  # a load that reads it finds out more
            self._metrics.count("kv_tier_errors_total", tier=slot.name, verb="size")
            return False

    def forget(self, slot: TierSlot, key: ChunkKey, entry: TierEntry | None) -> None:
        """Take an object that went away by itself off the books, leased or not. `entry` is what
        stood there when it was looked for: a copy saved since stays, or its bytes would lie on
        disk uncounted."""
        with self._lock:
            if slot.budget is not None and entry is not None and slot.budget.has(key, entry):
                slot.budget.unreserve(slot.budget.take_off(key))
