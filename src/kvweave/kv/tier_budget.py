"""What lies in one tier, how much of its budget that takes, and what may leave.

Plain bookkeeping: no IO, no torch, no lock. The inventory's lock covers every call.

    used      bytes of entries
    reserved  bytes promised to writes under way, and bytes of victims not yet gone
    used + reserved ≤ capacity, always
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvweave.kv.format.header import Header
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.policies import ItemUsage, Policy, RankHeap

if TYPE_CHECKING:
    from kvweave.kv.format.memory import Memory
    from kvweave.kv.provenance import Provenance


@dataclass(slots=True)
class TierEntry:
    """One object in one tier."""

    size_bytes: int
    pins: int = 0  # leases that hold it; it stays while there are any
    doomed: bool = False  # delete as soon as the last pin goes
    header: Header | None = field(default=None, repr=False)  # host tier: parsed once, on entry,
    memory: "Memory | None" = field(default=None, repr=False)  # and where its bytes lie;
    lacks: frozenset[str] = frozenset()  # extras that no load asked for: their place is empty,
    origin: str = ""  # and the tier that has them
    since: int = 0  # lower tiers: when it was written, in the time of `RemovedChunks`,
    of: "Provenance | None" = None  # and whose text it is, where this process wrote it


class TierBudget:
    """The entries of one tier under one byte budget and one policy."""

    def __init__(self, capacity_bytes: int, policy: Policy) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.reserved_bytes = 0
        self._policy = policy
        self._entries: dict[ChunkKey, TierEntry] = {}
        self._ranking: RankHeap[ChunkKey] = RankHeap()

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._entries)

    def get(self, key: ChunkKey) -> TierEntry | None:
        """An entry that may be leased: None for the absent and the doomed."""
        entry = self._entries.get(key)
        return None if entry is None or entry.doomed else entry

    def find(self, key: ChunkKey) -> TierEntry | None:
        """The entry of a key, doomed or not."""
        return self._entries.get(key)

    def has(self, key: ChunkKey, entry: TierEntry) -> bool:
        """Whether this very entry is still here: a later one of that key is another."""
        return self._entries.get(key) is entry

    def revive(self, key: ChunkKey) -> TierEntry | None:
        """The entry of a key that is being saved again: it is no longer doomed, if it was."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.doomed = False
        return entry

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes - self.reserved_bytes

    def reserve(self, size_bytes: int) -> bool:
        """Promise room to a write. False: it is not there."""
        if size_bytes > self.free_bytes:
            return False
        self.reserved_bytes += size_bytes
        return True

    def unreserve(self, size_bytes: int) -> None:
        self.reserved_bytes -= size_bytes
        assert self.reserved_bytes >= 0, "more was given back than reserved"

    def add(self, key: ChunkKey, size_bytes: int, usage: ItemUsage, *, reserved: bool) -> TierEntry:
        """Add an entry. `reserved`: its bytes were promised before, which all but a scan does."""
        assert key not in self._entries, "an object is in the books once"
        if reserved:
            self.unreserve(size_bytes)
        entry = self._entries[key] = TierEntry(size_bytes)
        self.used_bytes += size_bytes
        self.touch(key, usage)
        return entry

    def touch(self, key: ChunkKey, usage: ItemUsage) -> None:
        self._ranking.set(key, self._rank(usage), usage.last_access_s)

    def take_off(self, key: ChunkKey) -> int:
        """Take an entry off to delete it. Its bytes stay reserved until they are really gone:
        then give `unreserve` the size returned here."""
        size = self._remove(key)
        self.reserved_bytes += size
        return size

    def _remove(self, key: ChunkKey) -> int:
        entry = self._entries.pop(key)
        self._ranking.remove(key)
        self.used_bytes -= entry.size_bytes
        return entry.size_bytes

    def evict_for(self, size_bytes: int, newcomer: ItemUsage) -> list[tuple[ChunkKey, int]] | None:
        """Make room for a newcomer that is worth more than what it pushes out.

        Returns the victims with their sizes, already off the books, their room reserved for the
        newcomer; delete them, then call `settle`. None, and nothing happens, if pinned or better
        entries are in the way.
        """
        missing = size_bytes - self.free_bytes
        rank = self._rank(newcomer)
        victims: list[tuple[ChunkKey, int]] = []
        freed, highest = 0, 0.0
        for key, worth in self._ranking.lowest(self._may_leave):
            if freed >= missing:
                break
            if worth > rank:  # at a tie the newcomer wins: it is the more recent one
                return None
            victims.append((key, self._entries[key].size_bytes))
            freed += self._entries[key].size_bytes
            highest = max(highest, worth)
        if freed < missing:
            return None
        for key, _ in victims:
            self._remove(key)
        if victims:
            self._policy.record_eviction(highest)
        self.reserved_bytes += size_bytes + self._surplus(size_bytes, freed)
        return victims

    def settle(self, size_bytes: int, victims: list[tuple[ChunkKey, int]]) -> None:
        """The victims' bytes are really gone: what exceeds the newcomer's need is free again."""
        self.unreserve(self._surplus(size_bytes, sum(size for _, size in victims)))

    def num_pinned(self) -> int:
        return sum(1 for entry in self._entries.values() if entry.pins)

    def _rank(self, usage: ItemUsage) -> float:
        return -math.inf if usage.gives_way else self._policy.rank(usage)

    def _may_leave(self, key: ChunkKey) -> bool:
        return self._entries[key].pins == 0

    @staticmethod
    def _surplus(size_bytes: int, freed_bytes: int) -> int:
        """Victims may be larger than the newcomer: until they are deleted both count."""
        return max(0, freed_bytes - size_bytes)
