"""How often each chunk was asked for and what it cost to compute, present or not.

Frequencies must outlive eviction, or a popular chunk that was pushed out once would start from
nothing. The book is bounded: the key not touched for longest is forgotten first.
"""

from collections import OrderedDict

from kvweave.kv.keys import ChunkKey, ContextId, context_of
from kvweave.kv.policies import ItemUsage, UsageRecord


class UsageBook:
    """Usage records by key. Not thread-safe: the store's lock covers it."""

    def __init__(self, max_keys: int = 1 << 17) -> None:
        self._max_keys = max_keys
        self._records: OrderedDict[ChunkKey, UsageRecord] = OrderedDict()
        self._mean_cost_s = 0.0  # per token, over all that was computed: stands in for unknowns
        self._num_costs = 0
        self._mean_cost_per_byte_s = 0.0  # tokens of an object found on disk are not known here
        self._num_sized_costs = 0
        self._giving_way: set[ContextId] = set()

    def touch(self, key: ChunkKey, now_s: float, size_bytes: int) -> ItemUsage:
        """One access."""
        record = self._record(key)
        record.size = size_bytes or record.size
        record.touch(now_s)
        return self._usage(key, record)

    def found(self, key: ChunkKey, written_s: float, size_bytes: int) -> ItemUsage:
        """An object from an earlier life: counts as one access when it was written."""
        record = self._record(key)
        record.size = size_bytes
        if not record.uses:
            record.touch(written_s)
        return self._usage(key, record)

    def computed(self, key: ChunkKey, cost_s: float, num_tokens: int) -> None:
        """It was computed, which took `cost_s` seconds. Touch it first: then its size is known."""
        record = self._record(key)
        record.computed(cost_s, num_tokens)
        if record.size:
            self._num_sized_costs += 1
            mean_s = self._mean_cost_per_byte_s
            self._mean_cost_per_byte_s += (cost_s / record.size - mean_s) / self._num_sized_costs
        self._num_costs += 1
        self._mean_cost_s += (cost_s / num_tokens - self._mean_cost_s) / self._num_costs

    def give_way(self, context: ContextId) -> None:
        """What is of this context gives way from now on."""
        self._giving_way.add(context)

    def seen(self, key: ChunkKey) -> ItemUsage:
        return self._usage(key, self._record(key))

    def _usage(self, key: ChunkKey, record: UsageRecord) -> ItemUsage:
        usage = record.seen()
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
