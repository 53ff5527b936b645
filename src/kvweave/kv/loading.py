"""From a lease to a transfer, and back: what is on its way to host memory, and what becomes of it.

Ten requests for one chunk share one arrival. Its bytes land in the host tier if the chunk is worth
more than what it would push out, and stay there; otherwise in staging memory that goes with the
lease. What a copy in host memory lacks for a load is brought by an arrival whose layers are there
from the start, which is shared alike.
"""

import logging
from collections.abc import Sequence

import torch

from kvweave.kv.arrival import Arrival, Landing
from kvweave.kv.arrival_reads import ArrivalReads
from kvweave.kv.format.header import Header
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.memory import BufferPool, Memory
from kvweave.kv.inventory import Inventory
from kvweave.kv.lookup import Locator
from kvweave.kv.provenance import provenance_in
from kvweave.kv.removal import Remover
from kvweave.kv.saving import Saver
from kvweave.kv.tier_slot import TierEntry, TierSlot
from kvweave.kv.tiers.config import StoreConfig
from kvweave.kv.transfers import ActiveLoads, Holds, Lease, Pin, Sources, Transfer
from kvweave.reasons import Reason

log = logging.getLogger(__name__)


class Loader:
    """Starts loads, lets them go, and owns the arrivals: see `ArrivalOwner` for the methods that IO
    threads call. Thread-safe: takes the inventory's lock where it is not said to be held."""

    def __init__(
        self,
        cfg: StoreConfig,
        inventory: Inventory,
        remover: Remover,
        saver: Saver,
        locator: Locator,
    ) -> None:
        self.active = ActiveLoads()
        self._cfg = cfg
        self._inventory = inventory
        self._remover = remover
        self._saver = saver
        self._host_objects = saver.host_objects
        self._locator = locator
        self._lock = inventory.lock
        self._metrics = inventory.metrics
        host = inventory.host
        pinned = torch.cuda.is_available() if host is None else host.tier.pinned
        self._staging = BufferPool(cfg.staging_bytes, pinned=pinned)

    def close(self) -> None:
        """Nothing more is kept of what comes, and no buffers."""
        with self._lock:
            self.active.disown_all()
        self._staging.close()

    # ---- leases

    def start(self, lease: Lease, first_layers: Sequence[int], extras: frozenset[str]) -> Transfer:
        """Bring a lease's chunks, see `KVStore.load`."""
        assert not lease.released, "load of a released lease"
        sources = Sources({}, {}, {})
        started: list[ArrivalReads] = []
        with self._lock:
            for key in lease.keys:
                entry = self._in_host(lease.holds, key)
                if entry is not None and extras.isdisjoint(entry.lacks):
                    assert self._inventory.host is not None
                    slot = self._inventory.host.slot
                    sources.chunks[key] = self._arrival_in_host(key, slot, entry)
                    continue
                reads = self.active.get(key)
                if reads is None:
                    if entry is None:
                        reads = self._arrive(lease, key)
                    elif self._inventory.by_name[entry.origin].reads.is_open:
                        sources.lost[key] = Reason.TIER_FAILED
                        continue
                    else:
                        reads = self._complete_entry(key, entry)
                    started.append(reads)
                else:
                    self._metrics.count("kv_loads_joined_total", tier=reads.arrival.tier_name)
                reads.arrival.record.users += 1
                lease.holds.loads.append(reads)
                sources.chunks[key] = reads.arrival
                sources.reads[key] = reads
        # asks before the reads begin: they are cut so that the first layers come alone
        patience_s = {slot.name: slot.patience_s for slot in self._inventory.slots}
        lookahead = self._cfg.lookahead_layers
        transfer = Transfer(lease, sources, patience_s, lookahead, first_layers, extras)
        for reads in started:
            self._metrics.count("kv_loads_total", tier=reads.arrival.tier_name)
            reads.start()
        return transfer

    def let_go(self, holds: Holds) -> None:
        """Give back what a lease held."""
        doomed: list[tuple[ChunkKey, Pin]] = []
        unused: list[ArrivalReads] = []
        with self._lock:
            for key, pin in [*holds.pins.items(), *holds.late_pins]:
                if self._inventory.unpin(pin.slot, key, pin.entry):
                    doomed.append((key, pin))
            for reads in holds.loads:
                reads.arrival.record.users -= 1
                if reads.arrival.record.users == 0:
                    self.active.shut(reads.arrival)
                    unused.append(reads)
        for reads in unused:
            reads.cancel()  # ends in `idle`, now or when its last read returns
        for key, pin in doomed:
            self._remover.finish_delete(pin.slot, key, pin.entry)

    def _in_host(self, holds: Holds, key: ChunkKey) -> TierEntry | None:
        """The chunk as it lies in the host tier; pinned if it came there after `acquire`. Lock is
        held."""
        host = self._inventory.host
        if host is None:
            return None
        pin = holds.pins.get(key)
        if pin is None or pin.slot is not host.slot:
            entry = host.budget.get(key)
            if entry is None:
                return None
            entry.pins += 1
            holds.late_pins.append((key, Pin(host.slot, entry)))
        else:
            entry = pin.entry
        return entry

    def _arrive(self, lease: Lease, key: ChunkKey) -> ArrivalReads:
        """A new arrival, not yet begun. Lock is held."""
        slot = self._inventory.by_name[lease.tiers[key]]
        arrival = self._new_arrival(key, slot)
        pin = lease.holds.pins.get(key)
        arrival.record.source = None if pin is None else pin.entry
        reads = ArrivalReads(arrival, slot.tier, slot.pool)
        if pin is None or not pin.entry.doomed:  # deleted: for this lease alone
            self.active.add(reads, is_kept=True)
        return reads

    def _complete_entry(self, key: ChunkKey, entry: TierEntry) -> ArrivalReads:
        """What brings the extras that an object in host memory lacks, from the tier it came from.
        Lock is held."""
        slot = self._inventory.by_name[entry.origin]
        arrival = self._arrival_in_host(key, slot, entry)
        arrival.record.source = None if slot.budget is None else slot.budget.find(key)
        arrival.record.kept = entry
        entry.pins += 1  # until no IO thread writes there: `idle` takes it off
        reads = ArrivalReads(arrival, slot.tier, slot.pool)
        if not entry.doomed:
            self.active.add(reads, is_kept=False)  # it is there already
        return reads

    def _arrival_in_host(self, key: ChunkKey, slot: TierSlot, entry: TierEntry) -> Arrival:
        """Return an arrival whose layers are in host memory from the start."""
        assert entry.header is not None
        assert entry.memory is not None
        arrival = self._new_arrival(key, slot)
        arrival.landing = Landing(entry.memory, stays=True)
        arrival.held = frozenset(entry.header.extras) - entry.lacks
        with arrival.changed:
            arrival.open_up(entry.header, is_complete=True)
        return arrival

    def _new_arrival(self, key: ChunkKey, slot: TierSlot) -> Arrival:
        return Arrival(key, slot.name, slot.deadline_s, slot.pool.stalled_s, self)

    # ---- arrivals, on IO threads

    def land(self, arrival: Arrival, header: Header) -> Landing:
        memory = self._saver.room_in_host(arrival.key, header.total_bytes)
        if memory is not None:
            whole = not self._saver.may_lack_extras(arrival.key)
            return Landing(memory, stays=True, whole=whole)
        return Landing(self._staging.take(header.total_bytes), stays=False)

    def refuses(self, arrival: Arrival, header: Header, memory: Memory) -> bool:
        """What a remote tier still has of a removed chunk is not served: when it goes depends on
        whether that tier answers. Local tiers are rid of it at once, and serve those who found it
        before."""
        if not self._inventory.by_name[arrival.tier_name].tier.remote:
            return False
        return self._inventory.removed.covers(provenance_in(header, memory), since=0)

    def complete(self, arrival: Arrival) -> None:
        header, landing = arrival.header_and_landing()
        num_bytes = header.bytes_with(arrival.front)
        self._metrics.count("kv_bytes_loaded_total", num_bytes, tier=arrival.tier_name)
        self._inventory.by_name[arrival.tier_name].reads.record_success()
        source = arrival.record.source
        since = 0 if source is None else source.since
        of = provenance_in(header, landing.memory)
        if landing.stays and not self._inventory.removed.covers(of, since):
            self._keep(arrival, header, landing)
        self._put_aside(arrival)

    def _keep(self, arrival: Arrival, header: Header, landing: Landing) -> None:
        """Make an object of the host tier of it."""
        with self._lock:
            if not self.active.keeps(arrival):
                return  # deleted meanwhile, or damaged: the bytes go with the arrival
            lacks = frozenset(header.extras) - arrival.held
            origin = arrival.tier_name
            entry = self._host_objects.add(arrival.key, header, landing.memory, lacks, origin)
            if entry is None:
                return  # saved by another thread meanwhile: our copy goes with the arrival
            entry.pins += 1  # one for all users of the arrival; `idle` takes it off
            arrival.record.kept = entry
            self.active.shut(arrival)
        # the counter keeps its old name: dashboards know it
        self._metrics.count("kv_promotions_total", tier=arrival.tier_name)

    def fill(self, arrival: Arrival, name: str, data: memoryview) -> None:
        """An extra came when the object was open already: into its place, if that is still empty.
        Several arrivals may bring it into one object of the host tier, so that is decided here."""
        header, landing = arrival.header_and_landing()
        with self._lock:
            if arrival.record.kept is not None:
                self._host_objects.fill(arrival.key, arrival.record.kept, name, data)
            else:
                offset = header.extras[name].offset
                landing.memory.view[offset : offset + len(data)] = data
            arrival.held |= {name}
        self._metrics.count("kv_bytes_loaded_total", len(data), tier=arrival.tier_name)
        self._inventory.by_name[arrival.tier_name].reads.record_success()

    def idle(self, arrival: Arrival) -> bool:
        """No read is under way. If no lease uses the arrival either, its memory goes."""
        host, record = self._inventory.host, arrival.record
        with self._lock:
            if record.users > 0 or record.disposed:
                return False
            record.disposed = True
            self.active.end(arrival)
            landing, entry = arrival.landing, record.kept
            doomed = False
            if entry is not None:
                assert host is not None
                doomed = self._inventory.unpin(host.slot, arrival.key, entry)
        self._put_aside(arrival)
        if entry is not None:
            if doomed and host is not None:
                self._remover.finish_delete(host.slot, arrival.key, entry)
        elif landing is not None and landing.stays:
            self._host_objects.give_back(landing.memory)
        elif landing is not None:
            self._staging.give_back(landing.memory)
        return True

    def report_failure(self, arrival: Arrival, miss: Reason, detail: str) -> None:
        """Note what will not come: the object, or an extra that other loads need not know of. A
        damaged object goes in either case, so that the chunk is computed and saved whole."""
        self._metrics.count("kv_misses_total", reason=miss.value)
        slot, record = self._inventory.by_name[arrival.tier_name], arrival.record
        with self._lock:
            self.active.shut(arrival)
            if miss is Reason.CORRUPT:
                record.damaged = True
                self.active.end(arrival)
            if record.kept is not None and miss in (Reason.CORRUPT, Reason.ABSENT):
                self._host_objects.give_up_part(arrival.key, record.kept)
        self._locator.forget(arrival.key)
        name = f"{arrival.key.hex()[:16]}… in {slot.name}"
        match miss:
            case Reason.CORRUPT:
                log.warning("%s is damaged and refused: %s", name, detail)
                # an open file can be read wherever it is put, an object of a server cannot
                is_read_on = arrival.failure is None and arrival.whole() is None
                if not (slot.tier.remote and is_read_on):
                    self._put_aside(arrival)
            case Reason.FOREIGN:
                if self._remover.set_aside(slot, arrival.key):
                    log.warning("%s cannot be read here, nor can others like it: %s", name, detail)
            case Reason.ABSENT:
                self._remover.forget(slot, arrival.key, record.source)
            case Reason.TIER_FAILED | Reason.TOO_SLOW:
                log.info("%s did not come: %s", name, detail)
                self._metrics.count("kv_tier_errors_total", tier=slot.name, verb="read")
                slot.reads.record_failure(detail, at_once=miss is Reason.TOO_SLOW)

    def _put_aside(self, arrival: Arrival) -> None:
        """Take what an arrival was read from out of sight if it is damaged. Once."""
        record = arrival.record
        with self._lock:
            is_due = record.damaged and not record.put_aside
            record.put_aside |= is_due
        if is_due:
            slot = self._inventory.by_name[arrival.tier_name]
            self._remover.quarantine(slot, arrival.key, record.source)
