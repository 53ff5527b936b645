"""What is on its way to host memory: one arrival per chunk that others may join, and which of them
leave a copy there.

Plain bookkeeping under the stock's lock, which every caller holds.
"""

from kvweave.kv.arrivals import Arrival
from kvweave.kv.keys import ChunkKey


class UnderWay:
    """Books only: who starts, ends and serves arrivals is `loads.py` and `landings.py`."""

    def __init__(self) -> None:
        self._joinable: dict[ChunkKey, Arrival] = {}
        self._keepable: set[Arrival] = set()  # nobody deleted the chunk since they began

    def get(self, key: ChunkKey) -> Arrival | None:
        """The one to join."""
        return self._joinable.get(key)

    def add(self, arrival: Arrival, *, is_kept: bool) -> None:
        """Others may join it; `is_kept`: what it brings may stay in host memory."""
        self._joinable[arrival.key] = arrival
        if is_kept:
            self._keepable.add(arrival)

    def shut(self, arrival: Arrival) -> None:
        """Nobody joins it any more: the next request looks afresh."""
        if self._joinable.get(arrival.key) is arrival:
            del self._joinable[arrival.key]

    def keeps(self, arrival: Arrival) -> bool:
        return arrival in self._keepable

    def end(self, arrival: Arrival) -> None:
        """Its memory goes."""
        self._keepable.discard(arrival)

    def disown(self, key: ChunkKey) -> None:
        """A chunk is deleted: what is under way serves its leases and is not kept."""
        self._joinable.pop(key, None)
        self._keepable = {a for a in self._keepable if a.key != key}

    def disown_all(self) -> None:
        """As `disown`, whichever chunk it was that is deleted."""
        self._joinable.clear()
        self._keepable.clear()

    def tier_of(self, key: ChunkKey) -> str | None:
        """Where a chunk that is on its way comes from."""
        arrival = self._joinable.get(key)
        return None if arrival is None else arrival.tier_name

    def pending_bytes(self) -> dict[str, int]:
        """Bytes on their way to host memory, by the tier they come from."""
        pending: dict[str, int] = {}
        for arrival in self._joinable.values():
            name = arrival.tier_name
            pending[name] = pending.get(name, 0) + arrival.bytes_left()
        return pending

    def check_integrity(self) -> None:
        assert all(a.users > 0 for a in self._joinable.values()), "an arrival nobody uses"
