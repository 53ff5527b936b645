"""What is where: the tiers in use, what lies in them, and how often each chunk was asked for.

`Inventory` has the one lock of the store. Budgets hold because bytes are reserved before they are
written and counted until they are really gone. No IO happens under the lock. In lower tiers, where
writing and removing take IO, changes of one key take turns: a late delete never takes what a save
has just been told is kept.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvweave.kv.format.keys import ChunkKey, ContextId, context_of
from kvweave.kv.policies import ItemUsage, UsageRecord
from kvweave.kv.provenance import Provenance
from kvweave.kv.tier_slot import TierBudget, TierEntry, TierSlot
from kvweave.kv.tiers.host import HostTier
from kvweave.metrics import Metrics

log = logging.getLogger(__name__)

_TURN_S = 5.0  # how long to wait for a change of the same key in the same tier
_MOST_REMOVALS = 100_000  # remembered one by one
_MOST_EVICTIONS = 256  # the last ones, likewise


class StoreEviction(NamedTuple):
    """Chunk KV that left a full tier for something worth more."""

    at_s: float  # seconds since 1970
    tier: str
    key: ChunkKey
    size_bytes: int


class UsageBook:
    """How often each chunk was asked for and what it cost to compute, present or not.

    Frequencies must outlive eviction, or a popular chunk that was pushed out once would start from
    nothing. The book is bounded: the key not touched for longest is forgotten first. Not
    thread-safe: the inventory's lock covers it.
    """

    def __init__(self, max_keys: int = 1 << 17) -> None:
        self._max_keys = max_keys
        self._records: OrderedDict[ChunkKey, UsageRecord] = OrderedDict()
        self._mean_cost_s = 0.0  # per token, over all that was computed: stands in for unknowns
        self._num_costs = 0
        self._mean_cost_per_byte_s = 0.0  # tokens of an object found on disk are not known here
        self._num_sized_costs = 0
        self._giving_way: set[ContextId] = set()

    def touch(self, key: ChunkKey, now_s: float, size_bytes: int) -> ItemUsage:
        """Count one access."""
        record = self._record(key)
        record.size = size_bytes or record.size
        record.touch(now_s)
        return self._usage(key, record)

    def record_found(self, key: ChunkKey, written_s: float, size_bytes: int) -> ItemUsage:
        """Count an object from an earlier process as one access when it was written."""
        record = self._record(key)
        record.size = size_bytes
        if not record.uses:
            record.touch(written_s)
        return self._usage(key, record)

    def record_computation(self, key: ChunkKey, cost_s: float, num_tokens: int) -> None:
        """Record what the chunk cost to compute. Touch it first: then its size is known."""
        record = self._record(key)
        record.record_computation(cost_s, num_tokens)
        if record.size:
            self._num_sized_costs += 1
            mean_s = self._mean_cost_per_byte_s
            self._mean_cost_per_byte_s += (cost_s / record.size - mean_s) / self._num_sized_costs
        self._num_costs += 1
        self._mean_cost_s += (cost_s / num_tokens - self._mean_cost_s) / self._num_costs

    def give_way(self, context: ContextId) -> None:
        """Let chunks of this context leave first from now on."""
        self._giving_way.add(context)

    def snapshot(self, key: ChunkKey) -> ItemUsage:
        return self._usage(key, self._record(key))

    def _usage(self, key: ChunkKey, record: UsageRecord) -> ItemUsage:
        usage = record.snapshot()
        if not record.misses:
            cost_s = self._mean_cost_per_byte_s * record.size
            usage = usage._replace(cost_s=cost_s, cost_per_unit_s=self._mean_cost_s)
        return usage._replace(gives_way=context_of(key) in self._giving_way)

    def _record(self, key: ChunkKey) -> UsageRecord:
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = UsageRecord(size=0)
            if len(self._records) > self._max_keys:
                self._records.popitem(last=False)
        self._records.move_to_end(key)
        return record


Known = Callable[[Collection[str]], Collection[str]]


def _none(chunk_ids: Collection[str]) -> Collection[str]:
    return ()


class RemovedChunks:
    """Chunks that another process removed, and when this store heard of it.

    The process that removes a document deletes its chunk KV wherever it finds it, which takes a
    while; requests here that found the document before go on meanwhile. What they load, from bytes
    that lay there when the removal was heard of, is theirs alone: no copy of it is kept. Bytes that
    were saved since are another matter, and so are chunks that were brought back.

    Thread-safe. Time is a number that grows with every removal heard of.
    """

    def __init__(self, most: int = _MOST_REMOVALS) -> None:
        self.now = 0
        self._known: Known = _none
        self._most = most
        self._forgotten = 0  # of what is older than this some removal is forgotten
        self._died: OrderedDict[str, int] = OrderedDict()  # oldest removal first
        self._lock = threading.Lock()

    def know_by(self, known: Known) -> None:
        """From now on `known` says which of some chunks exist; until then none does."""
        self._known = known

    def existing(self, chunk_ids: Collection[str]) -> Collection[str]:
        """The chunks among these that exist. May block on IO."""
        return self._known(chunk_ids)

    def add(self, chunk_ids: Collection[str] | None) -> None:
        """Note that these were removed just now. None: it is not known which, so perhaps any."""
        with self._lock:
            self.now += 1
            if chunk_ids is None:
                self._died.clear()
                self._forgotten = self.now
            for name in chunk_ids or ():
                self._died[name] = self.now
                self._died.move_to_end(name)
            while len(self._died) > self._most:
                self._forgotten = self._died.popitem(last=False)[1]

    def covers(self, of: Provenance | None, since: int) -> bool:
        """Whether bytes that were there at `since` carry text of what was removed later, and is not
        back. May block on IO, where there is something to ask."""
        if since == self.now:
            return False
        names = () if of is None else (of.chunk, *of.behind)
        with self._lock:
            oldest = self._forgotten  # perhaps removed: it is not remembered
            died = {name: self._died.get(name, oldest) for name in names}
        died = {name: when for name, when in died.items() if when > since}
        if not died:
            return False
        if not died.keys() <= set(self.existing(list(died))):
            return True
        with self._lock:
            for name, when in died.items():
                if self._died.get(name) == when:  # not removed once more meanwhile
                    del self._died[name]
        return False


class HostSlot(NamedTuple):
    """The host tier with its parts at hand."""

    slot: TierSlot
    tier: HostTier
    budget: TierBudget


class Inventory:
    """The books of all tiers. Thread-safe: methods that say so expect `lock` to be held, all others
    take it themselves. What has no method here is read and changed under `lock`."""

    def __init__(self, slots: Sequence[TierSlot], metrics: Metrics) -> None:
        self.lock = threading.Lock()
        self.usage = UsageBook()
        self.slots = list(slots)
        self.by_name = {slot.name: slot for slot in slots}
        assert len(self.by_name) == len(self.slots), "two tiers of one name"
        self.host = _host_of(self.slots)
        self.below = self.slots[1:] if self.host else self.slots  # slower tiers, fastest first
        self.removed = RemovedChunks()
        self.foreign: set[tuple[str, ChunkKey]] = set()  # (tier, key) that cannot be read here
        self.leaving: set[ChunkKey] = set()  # off the host tier to be written down, with no writer
        self.metrics = metrics
        self.evictions: deque[StoreEviction] = deque(maxlen=_MOST_EVICTIONS)  # the last ones
        self._changing: set[tuple[str, ChunkKey]] = set()  # being written or removed below the host
        self._turn = threading.Condition(self.lock)

    def is_host(self, slot: TierSlot) -> bool:
        return self.host is not None and slot is self.host.slot

    def count_dropped(self, slot: TierSlot, reason: str) -> None:
        self.metrics.count("kv_saves_dropped_total", tier=slot.name, reason=reason)

    def count_evicted(self, slot: TierSlot, victims: Sequence[tuple[ChunkKey, int]]) -> None:
        """These, with their sizes, left a tier for something worth more. Lock is not held."""
        self.metrics.count("kv_evictions_total", len(victims), tier=slot.name)
        now_s = time.time()
        self.evictions.extend(StoreEviction(now_s, slot.name, *victim) for victim in victims)

    def give_way(self, context: ContextId) -> None:
        """Let chunk KV of this context leave full tiers first, see `KVStore.give_way`."""
        with self.lock:
            self.usage.give_way(context)
            for budget in self.budgets():
                for key in [key for key in budget if context_of(key) == context]:
                    budget.touch(key, self.usage.snapshot(key))

    def budgets(self) -> list[TierBudget]:
        return [slot.budget for slot in self.slots if slot.budget is not None]

    def unpin(self, slot: TierSlot, key: ChunkKey, entry: TierEntry) -> bool:
        """Take a lease's pin off. True: call `Remover.finish_delete`. Lock is held."""
        entry.pins -= 1
        assert entry.pins >= 0, "unpinned more often than pinned"
        assert slot.budget is not None
        return entry.pins == 0 and entry.doomed and slot.budget.has(key, entry)

    def take_off(self, slot: TierSlot, key: ChunkKey) -> int:
        """Take an entry off the books; give its size to `release_bytes` once it is deleted. Lock is
        held."""
        return slot.budget.take_off(key) if slot.budget is not None and key in slot.budget else 0

    def release_bytes(self, slot: TierSlot, size_bytes: int) -> None:
        """Release the room of deleted bytes, of the size that `take_off` returned."""
        if slot.budget is not None and size_bytes:
            with self.lock:
                slot.budget.unreserve(size_bytes)

    def put_back(self, budget: TierBudget, key: ChunkKey, size_bytes: int) -> None:
        """Book what could not be deleted, as good as gone. Lock is held."""
        if size_bytes <= budget.free_bytes and key not in budget:
            budget.add(key, size_bytes, self.usage.snapshot(key), reserved=False).doomed = True

    @contextmanager
    def turn_of(self, slot: TierSlot, key: ChunkKey) -> Iterator[bool]:
        """The only change of this key in this tier while it lasts. False: another one hangs."""
        name = (slot.name, key)
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


def _host_of(slots: Sequence[TierSlot]) -> HostSlot | None:
    if not slots or not isinstance(slots[0].tier, HostTier):
        assert not any(isinstance(s.tier, HostTier) for s in slots), "the host tier comes first"
        return None
    assert slots[0].budget is not None, "the host tier has a budget"
    return HostSlot(slots[0], slots[0].tier, slots[0].budget)
