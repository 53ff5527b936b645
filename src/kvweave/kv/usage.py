"""How often each chunk was asked for and what it cost to compute, present or not.

Frequencies must outlive eviction, or a popular chunk that was pushed out once would start from
nothing. The book is bounded: the key not touched for longest is forgotten first.
"""

from collections import OrderedDict

from kvweave.kv.keys import ChunkKey
from kvweave.kv.policies import Usage, UsageRecord


class UsageBook:
    """Usage records by key. Not thread-safe: the store's lock covers it."""

    def __init__(self, max_keys: int = 1 << 17) -> None:
        self._max_keys = max_keys
        self._records: OrderedDict[ChunkKey, UsageRecord] = OrderedDict()
        self._mean_cost_s = 0.0  # per token, over all that was computed: stands in for unknowns
        self._num_costs = 0
        self._mean_cost_per_byte_s = 0.0  # tokens of an object found on disk are not known here
        self._num_sized_costs = 0

    def touch(self, key: ChunkKey, now_s: float, size_bytes: int) -> Usage:
        """One access."""
        record = self._record(key)
        record.size = size_bytes or record.size
        record.touch(now_s)
        return self._usage(record)

    def found(self, key: ChunkKey, written_s: float, size_bytes: int) -> Usage:
        """An object from an earlier life: counts as one access when it was written."""
        record = self._record(key)
        record.size = size_bytes
        if not record.uses:
            record.touch(written_s)
        return self._usage(record)

    def computed(self, key: ChunkKey, cost_s: float, num_tokens: int) -> None:
        """It was computed, which took `cost_s` seconds. Touch it first: then its size is known. 0:
        it is to give way to all else, which says nothing of what others cost."""
        record = self._record(key)
        record.computed(cost_s, num_tokens)
        if not cost_s:
            return
        if record.size:
            self._num_sized_costs += 1
            mean_s = self._mean_cost_per_byte_s
            self._mean_cost_per_byte_s += (cost_s / record.size - mean_s) / self._num_sized_costs
        self._num_costs += 1
        self._mean_cost_s += (cost_s / num_tokens - self._mean_cost_s) / self._num_costs

    def seen(self, key: ChunkKey) -> Usage:
        return self._usage(self._record(key))

    def _usage(self, record: UsageRecord) -> Usage:
        if record.misses:
            return record.seen()
        cost_s = self._mean_cost_per_byte_s * record.size
        return Usage(record.uses, record.last_access_s, record.size, cost_s, self._mean_cost_s)

    def _record(self, key: ChunkKey) -> UsageRecord:
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = UsageRecord(size=0)
            if len(self._records) > self._max_keys:
                self._records.popitem(last=False)
        self._records.move_to_end(key)
        return record
