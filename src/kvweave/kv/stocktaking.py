"""What lies in local tiers from before is put into their books: when a store opens, and later where
a tier could not be listed then.

A folder may have lost its permissions, or a disk give errors. Then the tier rests as any does that
fails (`breaker.py`): what is asked for meanwhile is a miss of that reason, what is saved there is
dropped and counted. The request that comes when the rest is over has it listed once more, by the
tier's own threads, and waits for nothing. Nothing is read or written before the books are true: a
budget that does not count what is there would be exceeded.
"""

from functools import partial

from kvweave.errors import TierError
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.inventory import Inventory, TierSlot
from kvweave.kv.removal import Remover
from kvweave.kv.tier_budget import TierBudget
from kvweave.kv.tiers import StoredObject

_BATCH = 1024  # objects booked at a time: others wait for the lock no longer than that takes


class StockTaker:
    """Puts what lies in local tiers into their books. Thread-safe; takes the inventory's lock."""

    def __init__(self, inventory: Inventory, remover: Remover) -> None:
        self._inventory = inventory
        self._remover = remover
        self._lock = inventory.lock
        self._metrics = inventory.metrics

    def take_all(self) -> None:
        """Book what every tier below the host holds, before the store is used. Blocks on IO."""
        for slot in self._inventory.below:
            self._take(slot)

    def take_again(self) -> None:
        """Have what could not be listed listed again, where it is time to try. Returns at once."""
        for slot in self._inventory.below:
            if slot.is_booked or not slot.reads.allows():
                continue
            if not slot.pool.submit(partial(self._take, slot)):  # closed
                slot.reads.record_no_result()

    def _take(self, slot: TierSlot) -> None:
        """Book what a tier holds; evict what exceeds the budget."""
        budget = slot.budget
        if budget is None or slot.is_booked:
            return
        try:
            found = sorted(slot.tier.scan(), key=lambda o: o.written_s, reverse=True)
        except TierError as error:
            self._metrics.count("kv_tier_errors_total", tier=slot.name, verb="scan")
            why = f"{error}. It is used again, without a restart, as soon as it can be listed"
            slot.reads.record_failure(why, at_once=True)
            return
        surplus: list[tuple[ChunkKey, int]] = []
        for start in range(0, len(found), _BATCH):  # newest first: the oldest do not fit
            batch = found[start : start + _BATCH]
            with self._lock:
                left = [each for each in batch if not self._book(budget, each)]
            surplus += [(each.key, each.size_bytes) for each in left]
        for key, _ in surplus:
            self._remover.delete_quietly(slot, key)
        if surplus:
            self._inventory.count_evicted(slot, surplus)
        self._delete_again(slot, [each.key for each in found])
        with self._lock:
            slot.is_booked = True
            slot.unbooked_deletes.clear()
        slot.reads.record_success()

    def _book(self, budget: TierBudget, found: StoredObject) -> bool:
        """Book one object that was found. False: there is no room for it. Lock is held."""
        usage = self._inventory.usage.record_found(found.key, found.written_s, found.size_bytes)
        if found.size_bytes > budget.free_bytes:
            return False
        budget.add(found.key, found.size_bytes, usage, reserved=False)
        return True

    def _delete_again(self, slot: TierSlot, listed: list[ChunkKey]) -> None:
        """What was deleted before it was booked is there still, or is in the books and not there.
        What is deleted from now on is in the books."""
        with self._lock:
            again = slot.unbooked_deletes.intersection(listed)
        for key in again:
            self._remover.delete_from(slot, key)
