"""Putting objects into tiers: into host memory at once, into lower tiers in the background.

An object may lie in host memory without the extras that no load has asked for yet. A load that
wants no extras reads none but those that say whose text it is (`provenance.py`). The copy it leaves
in host memory has its layers and a place for each extra; the entry says which of them are empty
(`lacks`) and which tier has them (`origin`). An empty place is never read: a load that wants what
is missing has it brought first (`loading.py`), and a copy that lacks something is never written
down.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from kvweave.errors import TierError
from kvweave.kv.format.header import Header
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.memory import Memory
from kvweave.kv.format.objects import PackedChunk
from kvweave.kv.inventory import Inventory
from kvweave.kv.provenance import PROVENANCE, Provenance, provenance_in
from kvweave.kv.removal import Remover
from kvweave.kv.tier_slot import TierBudget, TierEntry, TierSlot
from kvweave.kv.tiers.config import StoreConfig
from kvweave.kv.writer import SaveTicket, Writer

log = logging.getLogger(__name__)

_MOST_SENT = 1 << 14  # objects written to remote tiers that are remembered


class HostObjects:
    """The objects in host memory, whole or not. Thread-safe: takes the inventory's lock where it is
    not said to be held. For stores that have a host tier."""

    def __init__(self, inventory: Inventory) -> None:
        self._lock = inventory.lock
        self._host = inventory.host
        self._usage = inventory.usage

    def provenances(self) -> list[tuple[ChunkKey, Provenance]]:
        """Whose text the objects are, whole or not, that say so."""
        if self._host is None:
            return []
        with self._lock:
            entries = [(key, self._host.budget.find(key)) for key in self._host.budget]
            found = [(key, _provenance(entry)) for key, entry in entries if entry is not None]
        return [(key, of) for key, of in found if of is not None]

    def give_back(self, memory: Memory) -> None:
        """Return memory from `Saver.room_in_host` that did not become an object."""
        assert self._host is not None
        with self._lock:
            self._host.budget.unreserve(self._host.tier.footprint(len(memory.view)))
            self._host.tier.cancel(memory)

    def add(
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
        assert self._host is not None
        _, tier, budget = self._host
        if budget.revive(key) is not None:
            return None
        tier.keep(key, memory, header.total_bytes, is_whole=not lacks)
        size = tier.footprint(header.total_bytes)
        entry = budget.add(key, size, self._usage.snapshot(key), reserved=True)
        entry.header, entry.memory = header, memory
        entry.lacks, entry.origin = lacks, origin
        return entry

    def fill(self, key: ChunkKey, entry: TierEntry, name: str, data: memoryview) -> None:
        """Put an extra that an object lacks into its place, checked and with its padding. Once:
        from then on it is read there, so it is never written again. `entry` is pinned. Lock is
        held."""
        assert self._host is not None
        assert entry.header is not None
        assert entry.memory is not None
        if name not in entry.lacks:
            return
        offset = entry.header.extras[name].offset
        entry.memory.view[offset : offset + len(data)] = data
        entry.lacks -= {name}
        if not entry.lacks:
            self._host.tier.complete(key)

    def fill_from(self, packed: PackedChunk, entry: TierEntry) -> None:
        """Fill in what an object lacks from the same one, just made. Lock is held."""
        if entry.header != packed.header:
            return  # of another making: its extras belong to other layers
        for name in tuple(entry.lacks):
            section = packed.header.extras[name]
            padded = packed.view[section.offset : packed.header.padded_end(section)]
            self.fill(packed.key, entry, name, padded)

    def give_up_part(self, key: ChunkKey, entry: TierEntry) -> None:
        """What an object lacks cannot be had: it goes with its last lease, so that the chunk is
        computed and saved whole. Lock is held."""
        if self._host is not None and entry.lacks and self._host.budget.has(key, entry):
            entry.doomed = True


def _provenance(entry: TierEntry) -> Provenance | None:
    assert entry.header is not None
    assert entry.memory is not None
    assert entry.lacks.isdisjoint(PROVENANCE), "every load reads whose text it is"
    return provenance_in(entry.header, entry.memory)


class Saver:
    """Makes room and writes. Thread-safe: takes the inventory's lock where it is not said to be
    held. Every tier below the host has writer threads of its own.

    What leaves host memory for a newcomer and is nowhere below is written down first, to the
    fastest local tier there is.
    """

    def __init__(self, cfg: StoreConfig, inventory: Inventory, remover: Remover) -> None:
        self._inventory = inventory
        self._remover = remover
        self._lock = inventory.lock
        self._host = inventory.host
        self._metrics = inventory.metrics
        self.host_objects = HostObjects(inventory)
        self._sent: OrderedDict[ChunkKey, Provenance] = OrderedDict()  # to remote tiers, lock held
        self._down_to = next((s for s in inventory.below if s.budget is not None), None)
        self.writers = {
            slot.name: Writer(
                slot.name,
                cfg.write_behind_bytes,
                partial(self._write, slot),
                cfg.write_deadline_s,
                partial(self._write_hangs, slot, cfg.write_deadline_s),
                slot.pool.on_bug,
                slot.tier.writes_at_once,
            )
            for slot in inventory.below
        }

    # ---- host memory

    def save_to_host(self, packed: PackedChunk) -> bool:
        """Copy an object into the host tier if it is worth its place. True: it is there."""
        if self._host is None:
            return False
        with self._lock:
            entry = self._host.budget.revive(packed.key)
            if entry is not None:
                self.host_objects.fill_from(packed, entry)
                return True
        memory = self.room_in_host(packed.key, packed.header.total_bytes)
        if memory is None:
            return False
        memory.view[:] = packed.view
        with self._lock:
            entry = self.host_objects.add(packed.key, packed.header, memory)
        if entry is None:
            self.host_objects.give_back(memory)
        return True

    def room_in_host(self, key: ChunkKey, size_bytes: int) -> Memory | None:
        """Host memory for an object that deserves it. None: it does not, or there is none."""
        if self._host is None:
            return None
        slot, tier, budget = self._host
        size = tier.footprint(size_bytes)
        for is_retry in (False, True):
            # free bytes in many holes are no room for one object: then evict its size once more
            ask = size + max(0, budget.free_bytes) if is_retry else size
            if not self._make_room(slot, key, ask):
                return None
            with self._lock:
                budget.unreserve(ask - size)
                try:
                    memory = tier.reserve(size_bytes)
                except TierError:  # closed, or broken: the chunk does without a copy here
                    self._metrics.count("kv_tier_errors_total", tier="host", verb="write")
                    budget.unreserve(size)
                    return None
                if memory is not None:
                    return memory
                budget.unreserve(size)
        self._metrics.count("kv_admissions_refused_total", tier="host", reason="fragmented")
        return None

    def may_lack_extras(self, key: ChunkKey) -> bool:
        """Whether host memory may hold a chunk in part. Not one that no local tier below has: it
        may have to be written there one day."""
        with self._lock:
            return self._down_to is None or self._is_below(key)

    # ---- room, in any tier

    def _make_room(self, slot: TierSlot, key: ChunkKey, size_bytes: int) -> bool:
        """Reserve `size_bytes` in a tier, evicting what is worth less. May block on IO."""
        budget, is_host = slot.budget, self._inventory.is_host(slot)
        assert budget is not None
        leaving: list[tuple[ChunkKey, Memory]] = []
        with self._lock:
            if budget.reserve(size_bytes):
                return True
            victims = budget.evict_for(size_bytes, self._inventory.usage.snapshot(key))
            if is_host:
                leaving = self._detach([victim for victim, _ in victims or ()])
        if victims is None:
            self._metrics.count("kv_admissions_refused_total", tier=slot.name, reason="worth less")
            return False
        if is_host:
            self._send_off(leaving)
        else:
            stuck = [victim for victim in victims if not self._delete_victim(slot, victim[0])]
            if stuck:  # no room after all: what is still there stays on the books
                with self._lock:
                    budget.settle(size_bytes, victims)
                    budget.unreserve(size_bytes)
                    for victim, victim_bytes in stuck:
                        self._inventory.put_back(budget, victim, victim_bytes)
                self._inventory.count_dropped(slot, "cannot evict")
                return False
        self._inventory.count_evicted(slot, victims)
        with self._lock:
            budget.settle(size_bytes, victims)
        return True

    def _delete_victim(self, slot: TierSlot, key: ChunkKey) -> bool:
        """Delete an object that was evicted, unless another writer has saved it again meanwhile:
        then its file is the new one. False: the tier failed. Waits for the key's turn; whoever has
        that waits for no other, so that two writers never wait for each other."""
        with self._inventory.turn_of(slot, key) as is_mine:
            if not is_mine:
                return False
            with self._lock:
                is_back = slot.budget is not None and key in slot.budget
            return is_back or self._remover.delete_quietly(slot, key) is not None

    def _detach(self, keys: Sequence[ChunkKey]) -> list[tuple[ChunkKey, Memory]]:
        """Take victims out of the host tier; their bytes stay until `_send_off`. Lock is held."""
        assert self._host is not None
        for key in keys:
            if self._down_to is None or self._is_below(key):
                continue
            if self._host.tier.is_whole(key):
                self._inventory.leaving.add(key)
            else:  # the tier it came from lost it since: half an object is never written down
                self._inventory.count_dropped(self._down_to, "in part")
        leaving = [(key, self._host.tier.detach(key)) for key in keys]
        return [(key, memory) for key, memory in leaving if memory is not None]

    def _send_off(self, leaving: Sequence[tuple[ChunkKey, Memory]]) -> None:
        """Write victims of the host tier down where needed, and free their memory."""
        assert self._host is not None
        for key, memory in leaving:
            self._write_down(key, memory)
            self._host.tier.cancel(memory)

    def _write_down(self, key: ChunkKey, memory: Memory) -> None:
        """Have an object that left the host tier written below. Copies it: its memory goes now."""
        target, leaving = self._down_to, self._inventory.leaving
        if target is None or key not in leaving:
            return
        copy = PackedChunk.from_bytes(key, memory.view)
        with self._lock:
            if key not in leaving:
                return  # deleted while it was copied
            leaving.discard(key)
            is_taken = self.writers[target.name].offer(copy, SaveTicket(), wait_s=0.0)
        if is_taken:
            # the counter keeps its old name: dashboards know it
            self._metrics.count("kv_demotions_total", tier=target.name)
        else:
            self._inventory.count_dropped(target, "write-behind is full")

    def _is_below(self, key: ChunkKey) -> bool:
        """Whether a slower tier has a key or is about to, as far as the books say. What a remote
        tier has, no book says: it may drop anything any time. Lock is held."""
        below = self._inventory.below
        booked = [(s.budget, self.writers[s.name]) for s in below if s.budget is not None]
        return any(key in budget or writer.pends(key) for budget, writer in booked)

    # ---- lower tiers

    def _write(self, slot: TierSlot, packed: PackedChunk) -> bool:
        """Write one object to a tier below the host. Runs on a writer thread of that tier."""
        with self._inventory.turn_of(slot, packed.key) as is_mine:
            if is_mine:
                return self._write_in_turn(slot, packed)
        self._inventory.count_dropped(slot, "a delete hangs")
        return False

    def _write_in_turn(self, slot: TierSlot, packed: PackedChunk) -> bool:
        budget, key, size = slot.budget, packed.key, packed.header.total_bytes
        if budget is not None:
            is_kept = self._revive(slot, budget, packed)
            if is_kept is not None:
                return is_kept
        if not slot.is_booked:  # how much room there is, nobody knows
            self._inventory.count_dropped(slot, "tier cannot be listed")
            return False
        if not slot.writes.allows():
            self._inventory.count_dropped(slot, "tier rests after failures")
            return False
        if budget is not None and not self._make_room(slot, key, size):
            slot.writes.record_success()  # no room is no failure, should this have been the probe
            return False
        kept = self._try_write(slot, packed)
        with self._lock:
            if budget is not None and not kept:
                budget.unreserve(size)
            elif budget is not None:
                usage = self._inventory.usage.snapshot(key)
                self._note_written(budget.add(key, size, usage, reserved=True), packed)
            elif kept:
                self._note_sent(packed)
            if kept:
                self._inventory.foreign.discard((slot.name, key))
        if kept:
            self._metrics.count("kv_saves_total", tier=slot.name)
        return kept

    def _revive(self, slot: TierSlot, budget: TierBudget, packed: PackedChunk) -> bool | None:
        """Keep the object of this key that a tier has, if any. None: write it, nothing is there;
        False: what is there cannot be read here, nor removed."""
        with self._lock:
            is_foreign = (slot.name, packed.key) in self._inventory.foreign
            if not is_foreign and (entry := budget.revive(packed.key)) is not None:
                self._note_written(entry, packed)
                return True
        if is_foreign and self._remover.remove_in_turn(slot, packed.key) is None:
            return False
        return None

    def _try_write(self, slot: TierSlot, packed: PackedChunk) -> bool:
        """Write, and count what goes wrong. True: the tier has the object."""
        try:
            kept = slot.tier.write(packed.key, [packed.view])
        except TierError as error:
            self._metrics.count("kv_tier_errors_total", tier=slot.name, verb="write")
            slot.writes.record_failure(str(error))
            return False
        slot.writes.record_success()
        if not kept:
            self._say_full(slot)
        return kept

    def _note_written(self, entry: TierEntry, packed: PackedChunk) -> None:
        """Lock is held."""
        entry.since = self._inventory.removed.now
        entry.of = provenance_in(packed.header, packed.memory)

    def _note_sent(self, packed: PackedChunk) -> None:
        """Lock is held."""
        of = provenance_in(packed.header, packed.memory)
        if of is not None:
            self._sent[packed.key] = of
            self._sent.move_to_end(packed.key)
            if len(self._sent) > _MOST_SENT:
                self._sent.popitem(last=False)

    def _write_hangs(self, slot: TierSlot, deadline_s: float) -> None:
        self._metrics.count("kv_tier_errors_total", tier=slot.name, verb="write")
        slot.writes.record_failure(f"a write takes longer than {deadline_s:g} s", at_once=True)

    def _say_full(self, slot: TierSlot) -> None:
        self._inventory.count_dropped(slot, "no room")
        if self._metrics.value("kv_saves_dropped_total", tier=slot.name, reason="no room") == 1:
            log.warning(
                "%s is full though its budget is not; free space there or lower capacity_bytes. "
                "Chunks that do not fit are computed again",
                slot.name,
            )

    def written_provenances(self) -> list[tuple[ChunkKey, Provenance]]:
        """Whose text the objects are that this process has written below the host tier, or is about
        to write. What is on its way there and with no writer yet is not written at all: it is not
        known whose it is. Lock is held."""
        self._inventory.leaving.clear()
        budgets = [slot.budget for slot in self._inventory.below if slot.budget is not None]
        entries = [(key, budget.find(key)) for budget in budgets for key in budget]
        of = [(key, entry.of) for key, entry in entries if entry is not None]
        of += self._sent.items()  # the last of them: a removal elsewhere may just have missed them
        for writer in self.writers.values():
            of += [(p.key, provenance_in(p.header, p.memory)) for p in writer.pending()]
        return [(key, each) for key, each in of if each is not None]
