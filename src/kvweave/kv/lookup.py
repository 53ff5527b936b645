"""Where a chunk's KV is: in the books, on its way, or in a tier that has to be asked.

Tiers without an index are asked for no longer than a deadline. Questions have threads of their own:
behind the reads of a busy tier they would wait past any deadline, and a tier that is merely busy
would count as broken.

What lies in local tiers from before is booked when a store opens, and later where a tier could not
be listed then: a folder may have lost its permissions, or a disk give errors. Such a tier rests as
any does that fails: what is looked for there is a miss of that reason, what is saved there is
dropped and counted. The request that comes when the rest is over has it listed once more, by the
tier's own threads, and waits for nothing. Nothing is read or written before the books are true: a
budget that does not count what is there would be exceeded.
"""

import threading
import time
from collections.abc import Collection, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from kvweave.errors import TierError
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.inventory import Inventory
from kvweave.kv.provenance import PROVENANCE
from kvweave.kv.removal import Remover
from kvweave.kv.tier_slot import IoPool, TierBudget, TierEntry, TierSlot
from kvweave.kv.tiers import StoredObject
from kvweave.kv.transfers import ActiveLoads
from kvweave.metrics import Metrics
from kvweave.reasons import Reason


class Residency(Enum):
    """What `peek` found."""

    HERE = "here"  # some tier has it
    ARRIVING = "arriving"  # on its way to host memory for another request
    ABSENT = "absent"


class Peek(NamedTuple):
    """Where a chunk's KV was a moment ago."""

    residency: Residency
    tier: str | None  # fastest tier that has it
    size_bytes: int | None
    extras: frozenset[str] = frozenset()  # that lie beside it, where that is known: in host memory


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


class Finder:
    """Where a chunk's KV is: in the books, on its way, or where only a tier can tell. Changes
    nothing, but has books made that are due. Any thread; the inventory's lock is taken where it is
    not said to be held."""

    def __init__(
        self, inventory: Inventory, locator: Locator, active: ActiveLoads, stock: StockTaker
    ) -> None:
        self._inventory = inventory
        self._stock = stock
        self._lock = inventory.lock
        self._locator = locator
        self._active = active

    def peek_books(self, key: ChunkKey) -> Peek | None:
        """What the books say; None where only a tier could tell."""
        with self._lock:
            slot, entry = self.find(key, {})
            if slot is not None and entry is not None:
                header = entry.header  # of objects in host memory
                extras = frozenset() if header is None else header.extras.keys() - PROVENANCE
                return Peek(Residency.HERE, slot.name, entry.size_bytes, frozenset(extras))
            arriving_from = self._active.tier_of(key)
            if arriving_from is not None:
                return Peek(Residency.ARRIVING, arriving_from, None)
        return None

    def unknown(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Keys that `peek_books` has no answer for."""
        with self._lock:
            found = {key: self.find(key, {})[0] or self._active.tier_of(key) for key in keys}
        return [key for key, where in found.items() if where is None]

    def locate(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Located]:
        """Ask the tiers for what is not in the books. The deleted that only await their last lease
        are not looked for: their bytes are still there."""
        self._stock.take_again()
        budgets = self._inventory.budgets()
        with self._lock:
            entries = {key: [budget.find(key) for budget in budgets] for key in keys}
            foreign = frozenset(self._inventory.foreign)
        doomed = {k for k, found in entries.items() if any(e and e.doomed for e in found)}
        wanted = [key for key in keys if key not in doomed]
        booked = [slot for slot in self._inventory.below if slot.is_booked]
        return self._locator.locate(booked, wanted, foreign)

    def find(
        self, key: ChunkKey, located: dict[ChunkKey, Located]
    ) -> tuple[TierSlot | None, TierEntry | None]:
        """Fastest tier in working order that has a key, with its entry if that tier has a budget.
        Lock is held."""
        for slot in self._inventory.slots:
            entry = slot.budget.get(key) if slot.budget is not None else None
            if entry is None or slot.reads.is_open or (slot.name, key) in self._inventory.foreign:
                continue
            return slot, entry
        return (located[key].slot, None) if key in located else (None, None)

    def why_absent(self, key: ChunkKey) -> Reason:
        """Lock is held."""
        for slot in self._inventory.slots:
            if not slot.is_booked:  # it may have it
                return Reason.TIER_FAILED
            if slot.reads.is_open and (slot.budget is None or key in slot.budget):
                return Reason.TIER_FAILED
        return Reason.ABSENT
