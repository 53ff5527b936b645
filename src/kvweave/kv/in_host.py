"""Objects in host memory: whole, or without the extras that no load has asked for yet.

A load that wants no extras reads none but those that say whose text it is (`forget.py`). The copy
it leaves in host memory has its layers and a place for each extra; the entry says which of them are
empty (`lacks`) and which tier has them (`origin`). Nobody reads an empty place: a load that wants
what is missing has it brought first (`completion.py`), and a copy that lacks something is never
written down.
"""

from kvweave.kv.format.header import Header
from kvweave.kv.format.objects import PackedChunk
from kvweave.kv.keys import ChunkKey
from kvweave.kv.memory import Memory
from kvweave.kv.provenance import PROVENANCE, Provenance, provenance_in
from kvweave.kv.removal import Removal
from kvweave.kv.tier_budget import TierEntry


class InHost(Removal):
    """Thread-safe, see `Books`. For stores that have a host tier."""

    def provenances(self) -> list[tuple[ChunkKey, Provenance]]:
        """Whose text the objects are, whole or not, that say so."""
        if self.host is None:
            return []
        with self.lock:
            entries = [(key, self.host.shelf.find(key)) for key in self.host.shelf]
            found = [(key, _provenance(entry)) for key, entry in entries if entry is not None]
        return [(key, of) for key, of in found if of is not None]

    def give_back_host(self, memory: Memory) -> None:
        """Return memory from `room_in_host` that did not become an object."""
        assert self.host is not None
        with self.lock:
            self.host.shelf.unreserve(self.host.tier.footprint(len(memory.view)))
            self.host.tier.cancel(memory)

    def shelve_in_host(
        self,
        key: ChunkKey,
        header: Header,
        memory: Memory,
        lacks: frozenset[str] = frozenset(),
        origin: str = "",
    ) -> TierEntry | None:
        """Make filled host memory an object. None: the key is there already. Lock is held.

        `lacks` are extras that were not filled in; the tier `origin` has them.
        """
        assert self.host is not None
        _, tier, shelf = self.host
        if shelf.revive(key) is not None:
            return None
        tier.keep(key, memory, header.total_bytes, is_whole=not lacks)
        size = tier.footprint(header.total_bytes)
        entry = shelf.add(key, size, self.usage.seen(key), reserved=True)
        entry.header, entry.memory = header, memory
        entry.lacks, entry.origin = lacks, origin
        return entry

    def fill_in_host(self, key: ChunkKey, entry: TierEntry, name: str, data: memoryview) -> None:
        """Put an extra that an object lacks into its place, checked and with its padding. Once:
        from then on it is read there, so it is never written again. `entry` is pinned. Lock is
        held."""
        assert self.host is not None
        assert entry.header is not None
        assert entry.memory is not None
        if name not in entry.lacks:
            return
        offset = entry.header.extras[name].offset
        entry.memory.view[offset : offset + len(data)] = data
        entry.lacks -= {name}
        if not entry.lacks:
            self.host.tier.complete(key)

    def complete_from(self, packed: PackedChunk, entry: TierEntry) -> None:
        """Fill in what an object lacks from the same one, just made. Lock is held."""
        if entry.header != packed.header:
            return  # of another making: its extras belong to other layers
        for name in tuple(entry.lacks):
            section = packed.header.extras[name]
            padded = packed.view[section.offset : packed.header.padded_end(section)]
            self.fill_in_host(packed.key, entry, name, padded)

    def give_up_part(self, key: ChunkKey, entry: TierEntry) -> None:
        """What an object lacks cannot be had: it goes with its last lease, so that the chunk is
        computed and saved whole. Lock is held."""
        if self.host is not None and entry.lacks and self.host.shelf.has(key, entry):
            entry.doomed = True


def _provenance(entry: TierEntry) -> Provenance | None:
    assert entry.header is not None
    assert entry.memory is not None
    assert entry.lacks.isdisjoint(PROVENANCE), "every load reads whose text it is"
    return provenance_in(entry.header, entry.memory)
