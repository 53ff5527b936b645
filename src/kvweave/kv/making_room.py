"""Room in a tier: who leaves it for a newcomer, and what is written down first (demotion)."""

from collections.abc import Mapping, Sequence

from kvweave.kv.format.objects import PackedChunk
from kvweave.kv.in_host import InHost
from kvweave.kv.keys import ChunkKey
from kvweave.kv.memory import Memory
from kvweave.kv.places import TierSlot
from kvweave.kv.writer import SaveTicket, Writer
from kvweave.metrics import Metrics


class MakingRoom(InHost):
    """Thread-safe, see `Books`."""

    writers: Mapping[str, Writer]  # of the tiers below the host; `Stock` makes them

    def __init__(self, places: Sequence[TierSlot], metrics: Metrics) -> None:
        super().__init__(places, metrics)
        self._demote_to = next((p for p in self.below if p.shelf is not None), None)

    def room_in_host(self, key: ChunkKey, size_bytes: int) -> Memory | None:
        """Host memory for an object that deserves it. None: it does not, or there is none."""
        if self.host is None:
            return None
        place, tier, shelf = self.host
        size = tier.footprint(size_bytes)
        for is_retry in (False, True):
            # free bytes in many holes are no room for one object: then evict its size once more
            ask = size + max(0, shelf.free_bytes) if is_retry else size
            if not self._make_room(place, key, ask):
                return None
            with self.lock:
                shelf.unreserve(ask - size)
                memory = tier.reserve(size_bytes)
                if memory is not None:
                    return memory
                shelf.unreserve(size)
        self._metrics.count("kv_admissions_refused_total", tier="host", reason="fragmented")
        return None

    def may_lack_extras(self, key: ChunkKey) -> bool:
        """Whether host memory may hold a chunk in part. Not one that no local tier below has: it
        may have to be written there one day."""
        with self.lock:
            return self._demote_to is None or self._is_below(key)

    def _make_room(self, place: TierSlot, key: ChunkKey, size_bytes: int) -> bool:
        """Reserve `size_bytes` in a tier, evicting what is worth less. May block on IO."""
        shelf = place.shelf
        assert shelf is not None
        leaving: list[tuple[ChunkKey, Memory]] = []
        with self.lock:
            if shelf.reserve(size_bytes):
                return True
            victims = shelf.evict_for(size_bytes, self.usage.seen(key))
            if self._is_host(place):
                leaving = self._detach([victim for victim, _ in victims or ()])
        if victims is None:
            self._metrics.count("kv_admissions_refused_total", tier=place.name, reason="worth less")
            return False
        if self._is_host(place):
            self._send_off(leaving)
        else:  # on the writer thread, the only one that writes there: nobody can save a victim now
            stuck = [v for v in victims if self.delete_quietly(place, v[0]) is None]
            if stuck:  # no room after all: what is still there stays on the books
                with self.lock:
                    shelf.settle(size_bytes, victims)
                    shelf.unreserve(size_bytes)
                    for victim, victim_bytes in stuck:
                        self._put_back(shelf, victim, victim_bytes)
                self.count_dropped(place, "cannot evict")
                return False
        self._metrics.count("kv_evictions_total", len(victims), tier=place.name)
        with self.lock:
            shelf.settle(size_bytes, victims)
        return True

    def _detach(self, keys: Sequence[ChunkKey]) -> list[tuple[ChunkKey, Memory]]:
        """Take victims out of the host tier; their bytes stay until `_send_off`. Lock is held."""
        assert self.host is not None
        for key in keys:
            if self._demote_to is None or self._is_below(key):
                continue
            if self.host.tier.is_whole(key):
                self._demoting.add(key)
            else:  # the tier it came from lost it since: half an object is never written down
                self.count_dropped(self._demote_to, "in part")
        leaving = [(key, self.host.tier.detach(key)) for key in keys]
        return [(key, memory) for key, memory in leaving if memory is not None]

    def _send_off(self, leaving: Sequence[tuple[ChunkKey, Memory]]) -> None:
        """Write victims of the host tier down where needed, and free their memory."""
        assert self.host is not None
        for key, memory in leaving:
            self._demote(key, memory)
            self.host.tier.cancel(memory)

    def _is_below(self, key: ChunkKey) -> bool:
        """Whether a slower tier has a key or is about to, as far as the books say. What a remote
        tier has, no book says: it may drop anything any time. Lock is held."""
        shelved = [(p.shelf, self.writers[p.name]) for p in self.below if p.shelf is not None]
        return any(key in shelf or writer.pends(key) for shelf, writer in shelved)

    def _demote(self, key: ChunkKey, memory: Memory) -> None:
        """Write an object that left the host tier down. Copies it: its memory goes now."""
        target = self._demote_to
        if target is None or key not in self._demoting:
            return
        copy = PackedChunk.from_bytes(key, memory.view)
        with self.lock:
            if key not in self._demoting:
                return  # deleted while it was copied
            self._demoting.discard(key)
            is_taken = self.writers[target.name].offer(copy, SaveTicket(), wait_s=0.0)
        if is_taken:
            self._metrics.count("kv_demotions_total", tier=target.name)
        else:
            self.count_dropped(target, "write-behind is full")
