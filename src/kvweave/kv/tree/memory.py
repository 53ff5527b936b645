"""What is remembered of paths that are not in the tree now."""

from collections import OrderedDict

from kvweave.kv.policies import UsageRecord


class PathMemory:
    """Usage of absent paths, bounded: the one not asked for for longest is forgotten first.

    How often a path is asked for counts over a window of time, whether or not its KV was kept; a
    popular path that was pushed out once does not start from nothing. With room for none, every
    path does. Not thread-safe.
    """

    def __init__(self, max_paths: int) -> None:
        self._max_paths = max_paths
        self._records: OrderedDict[bytes, UsageRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def record(self, key: bytes, num_tokens: int) -> UsageRecord:
        """The running numbers of an absent path, made at its first access."""
        record = self._records.get(key)
        if record is None:
            record = UsageRecord(size=num_tokens)
            self.keep(key, record)
        else:
            self._records.move_to_end(key)
        return record

    def take(self, key: bytes, num_tokens: int) -> UsageRecord:
        """The path enters the tree and carries its own numbers from now on."""
        return self._records.pop(key, None) or UsageRecord(size=num_tokens)

    def keep(self, key: bytes, record: UsageRecord) -> None:
        """The path left the tree."""
        self._records[key] = record
        if len(self._records) > self._max_paths:
            self._records.popitem(last=False)
