"""Brings the extras that a copy in host memory lacks, from the tier the copy came from."""

from kvweave.kv.arrivals import Arrival, Hooks
from kvweave.kv.awaited import Landing
from kvweave.kv.io_pool import IoPool
from kvweave.kv.keys import ChunkKey
from kvweave.kv.tier_budget import TierEntry
from kvweave.kv.tiers.base import Tier


class Completion(Arrival):
    """An arrival whose layers are there from the start: they lie in the host tier.

    The entry stays pinned until no IO thread can write to it (see `Arrival.kept`).
    """

    def __init__(
        self,
        key: ChunkKey,
        entry: TierEntry,
        tier: Tier,
        pool: IoPool,
        deadline_s: float,
        hooks: Hooks,
    ) -> None:
        super().__init__(key, tier, pool, deadline_s, hooks)
        assert entry.header is not None
        assert entry.memory is not None
        self.kept = entry
        self.landing = Landing(entry.memory, stays=True)
        self.held = self._taken = frozenset(entry.header.extras) - entry.lacks
        with self._changed:
            self._open_up(entry.header)
        self._ready = [True] * len(entry.header.layers)

    def _open(self) -> None:
        # no look at its header: an extra of another making does not match the checksum that came
        # with the layers
        if self._open_reader() is not None:
            self._launch_extras()
