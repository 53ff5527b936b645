"""What a request holds: a lease, which keeps chunk KV from going away."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NamedTuple

from kvweave.kv.arrival_reads import ArrivalReads
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.inventory import TierSlot
from kvweave.kv.tier_budget import TierEntry
from kvweave.reasons import Reason


class Pin(NamedTuple):
    slot: TierSlot
    entry: TierEntry


class Holds(NamedTuple):
    """What a lease keeps from going away. Changed by the store alone, under its lock."""

    pins: dict[ChunkKey, Pin]
    loads: list[ArrivalReads]
    late_pins: list[tuple[ChunkKey, Pin]]  # chunks that reached the host tier after `acquire`


class Lease:
    """A pin on chunk KV. Made by `KVStore.acquire`, belongs to one request, releases itself.

    While it is held the bytes behind it stay where they are; after `release` no view that came
    through it may be touched. Releasing twice is harmless. Not thread-safe: one request, one owner.
    """

    def __init__(
        self,
        tiers: Mapping[ChunkKey, str],
        missing: Mapping[ChunkKey, Reason],
        holds: Holds,
        release: Callable[[Holds], None],
        abandon: Callable[[Holds], None],
    ) -> None:
        self.tiers = dict(tiers)  # chunk → tier it will come from, in the order asked for
        self.missing = dict(missing)  # chunk → why it is not in the lease
        self.holds = holds  # the store's
        self.released = False
        self._release = release
        self._abandon = abandon  # like release, but safe inside a garbage collection

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """What is held, each once, in the order asked for."""
        return tuple(self.tiers)

    def release(self) -> None:
        if not self.released:
            self.released = True
            self._release(self.holds)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if not self.released:
            self.released = True
            self._abandon(self.holds)
