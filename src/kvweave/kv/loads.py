"""Loads under way: from a lease to a transfer, and what becomes of the bytes.

What arrives lands in the host tier if the chunk is worth more than what it would push out
(promotion), otherwise in staging memory that goes with the lease. Ten requests for one chunk share
one arrival. What a copy in host memory lacks for a load is brought by a completion, which is shared
alike.
"""

import logging
from collections.abc import Sequence

import torch

from kvweave.kv.arrivals import Arrival, Hooks
from kvweave.kv.awaited import Landing
from kvweave.kv.completion import Completion
from kvweave.kv.config import StoreConfig
from kvweave.kv.keys import ChunkKey
from kvweave.kv.layout import Header
from kvweave.kv.leases import Holds, Lease, Pin
from kvweave.kv.locate import Locator
from kvweave.kv.memory import BufferPool
from kvweave.kv.residency import Miss
from kvweave.kv.shelf import Entry
from kvweave.kv.stock import Stock
from kvweave.kv.transfers import Resident, Source, Transfer
from kvweave.metrics import Metrics

log = logging.getLogger(__name__)


class Loads:
    """Thread-safe: the stock's lock covers what is in here."""

    def __init__(self, cfg: StoreConfig, stock: Stock, locator: Locator, metrics: Metrics) -> None:
        self._cfg = cfg
        self._stock = stock
        self._locator = locator
        self.metrics = metrics
        self._lock = stock.lock
        self._by_name = {place.name: place for place in stock.places}
        assert len(self._by_name) == len(stock.places), "two tiers of one name"
        host = stock.host
        pinned = torch.cuda.is_available() if host is None else host.tier.pinned
        self._staging = BufferPool(cfg.staging_bytes, pinned=pinned)
        self._arrivals: dict[ChunkKey, Arrival] = {}  # under way and joinable
        self._keepable: set[Arrival] = set()  # under way, and nobody deleted the chunk since
        self._hooks = Hooks(self._land, self._complete, self._fill, self._idle, self._failed)

    def tier_of(self, key: ChunkKey) -> str | None:
        """Where a chunk that is on its way comes from. Lock is held."""
        arrival = self._arrivals.get(key)
        return None if arrival is None else arrival.tier_name

    def pending_bytes(self) -> dict[str, int]:
        """Bytes on their way to host memory, by the tier they come from. Lock is held."""
        pending: dict[str, int] = {}
        for arrival in self._arrivals.values():
            name = arrival.tier_name
            pending[name] = pending.get(name, 0) + arrival.bytes_left()
        return pending

    def disown(self, key: ChunkKey) -> None:
        """A chunk is deleted: what is under way serves its leases and is not kept. Lock is held."""
        self._arrivals.pop(key, None)
        self._keepable = {a for a in self._keepable if a.key != key}

    def disown_all(self) -> None:
        """As `disown`, whichever chunk it was that is deleted. Lock is held."""
        self._arrivals.clear()
        self._keepable.clear()

    def check_integrity(self) -> None:
        """Lock is held."""
        assert all(a.users > 0 for a in self._arrivals.values()), "an arrival nobody uses"

    def start(self, lease: Lease, first_layers: Sequence[int], extras: frozenset[str]) -> Transfer:
        """Bring a lease's chunks, see `KVStore.load`."""
        assert not lease.released, "load of a released lease"
        sources: dict[ChunkKey, Source] = {}
        lost: dict[ChunkKey, Miss] = {}
        started: list[Arrival] = []
        with self._lock:
            for key in lease.keys:
                entry = self._in_host(lease.holds, key)
                if entry is not None and extras.isdisjoint(entry.lacks):
                    sources[key] = Resident(entry)
                    continue
                arrival = self._arrivals.get(key)
                if arrival is None:
                    if entry is None:
                        arrival = self._arrive(lease, key)
                    elif self._by_name[entry.origin].reads.is_open:
                        lost[key] = Miss.TIER_FAILED
                        continue
                    else:
                        arrival = self._complete_entry(key, entry)
                    started.append(arrival)
                else:
                    self.metrics.count("kv_loads_joined_total", tier=arrival.tier_name)
                arrival.users += 1
                lease.holds.arrivals.append(arrival)
                sources[key] = arrival
        # asks before the reads begin: they are cut so that the first layers come alone
        budgets_s = {place.name: place.budget_s for place in self._stock.places}
        lookahead = self._cfg.lookahead_layers
        transfer = Transfer(lease, sources, budgets_s, lookahead, first_layers, extras, lost)
        for arrival in started:
            self.metrics.count("kv_loads_total", tier=arrival.tier_name)
            arrival.start()
        return transfer

    def _arrive(self, lease: Lease, key: ChunkKey) -> Arrival:
        """A new arrival, not yet begun. Lock is held."""
        place = self._by_name[lease.tiers[key]]
        arrival = Arrival(key, place.tier, place.pool, place.deadline_s, self._hooks)
        pin = lease.holds.pins.get(key)
        arrival.source = None if pin is None else pin.entry
        if pin is None or not pin.entry.doomed:  # deleted: for this lease alone
            self._arrivals[key] = arrival
            self._keepable.add(arrival)
        return arrival

    def _complete_entry(self, key: ChunkKey, entry: Entry) -> Arrival:
        """What brings the extras that an object in host memory lacks. Lock is held."""
        place = self._by_name[entry.origin]
        work = Completion(key, entry, place.tier, place.pool, place.deadline_s, self._hooks)
        work.source = None if place.shelf is None else place.shelf.find(key)
        entry.pins += 1  # until no IO thread writes there: _idle takes it off
        if not entry.doomed:
            self._arrivals[key] = work
        return work

    def let_go(self, holds: Holds) -> None:
        """Give back what a lease held."""
        doomed: list[tuple[ChunkKey, Pin]] = []
        unused: list[Arrival] = []
        with self._lock:
            for key, pin in [*holds.pins.items(), *holds.late_pins]:
                if self._stock.unpin(pin.place, key, pin.entry):
                    doomed.append((key, pin))
            for arrival in holds.arrivals:
                arrival.users -= 1
                if arrival.users == 0:
                    if self._arrivals.get(arrival.key) is arrival:
                        del self._arrivals[arrival.key]
                    unused.append(arrival)
        for arrival in unused:
            arrival.cancel()  # ends in _idle, now or when its last read returns
        for key, pin in doomed:
            self._stock.finish_delete(pin.place, key, pin.entry)

    def _in_host(self, holds: Holds, key: ChunkKey) -> Entry | None:
        """The chunk as it lies in the host tier; pinned if it came there after `acquire`. Lock is
        held."""
        host = self._stock.host
        if host is None:
            return None
        pin = holds.pins.get(key)
        if pin is None or pin.place is not host.place:
            entry = host.shelf.get(key)
            if entry is None:
                return None
            entry.pins += 1
            holds.late_pins.append((key, Pin(host.place, entry)))
        else:
            entry = pin.entry
        return entry

    # ---- arrivals: called on IO threads

    def _land(self, arrival: Arrival, header: Header) -> Landing:
        memory = self._stock.room_in_host(arrival.key, header.total_bytes)
        if memory is not None:
            whole = not self._stock.may_lack_extras(arrival.key)
            return Landing(memory, stays=True, whole=whole)
        return Landing(self._staging.take(header.total_bytes), stays=False)

    def _complete(self, arrival: Arrival) -> None:
        header, landing = arrival.header, arrival.landing
        assert header is not None
        assert landing is not None
        num_bytes = header.bytes_with(arrival.front)
        self.metrics.count("kv_bytes_loaded_total", num_bytes, tier=arrival.tier_name)
        self._by_name[arrival.tier_name].reads.succeeded()
        if not landing.stays:
            return
        with self._lock:
            if arrival not in self._keepable:
                return  # deleted meanwhile: the bytes go with the arrival
            lacks = frozenset(header.extras) - arrival.held
            origin = arrival.tier_name
            entry = self._stock.shelve_in_host(arrival.key, header, landing.memory, lacks, origin)
            if entry is None:
                return  # saved by somebody else meanwhile: our copy goes with the arrival
            entry.pins += 1  # one for all users of the arrival; _idle takes it off
            arrival.kept = entry
            if self._arrivals.get(arrival.key) is arrival:
                del self._arrivals[arrival.key]
        self.metrics.count("kv_promotions_total", tier=arrival.tier_name)

    def _fill(self, arrival: Arrival, name: str, data: memoryview) -> None:
        """An extra came when the object was open already: into its place, if that is still empty.
        Several arrivals may bring it into one object of the host tier, so that is decided here."""
        header, landing = arrival.header, arrival.landing
        assert header is not None
        assert landing is not None
        with self._lock:
            if arrival.kept is not None:
                self._stock.fill_in_host(arrival.key, arrival.kept, name, data)
            else:
                offset = header.extras[name].offset
                landing.memory.view[offset : offset + len(data)] = data
            arrival.held |= {name}
        self.metrics.count("kv_bytes_loaded_total", len(data), tier=arrival.tier_name)
        self._by_name[arrival.tier_name].reads.succeeded()

    def _idle(self, arrival: Arrival) -> None:
        """No read is under way. If no lease uses the arrival either, its memory goes."""
        host = self._stock.host
        with self._lock:
            if arrival.users > 0 or arrival.disposed:
                return
            arrival.disposed = True
            self._keepable.discard(arrival)
            landing, entry = arrival.landing, arrival.kept
            doomed = False
            if entry is not None:
                assert host is not None
                doomed = self._stock.unpin(host.place, arrival.key, entry)
        arrival.close_reader()
        if entry is not None:
            if doomed and host is not None:
                self._stock.finish_delete(host.place, arrival.key, entry)
        elif landing is not None and landing.stays:
            self._stock.give_back_host(landing.memory)
        elif landing is not None:
            self._staging.give_back(landing.memory)

    def _failed(self, arrival: Arrival, miss: Miss, detail: str) -> None:
        self.metrics.count("kv_misses_total", reason=miss.value)
        place = self._by_name[arrival.tier_name]
        with self._lock:
            if self._arrivals.get(arrival.key) is arrival:
                del self._arrivals[arrival.key]  # the next request tries afresh
            if arrival.kept is not None and miss in (Miss.CORRUPT, Miss.ABSENT):
                self._stock.give_up_part(arrival.key, arrival.kept)
        self._locator.forget(arrival.key)
        name = f"{arrival.key.hex()[:16]}… in {place.name}"
        match miss:
            case Miss.CORRUPT:
                log.warning("%s is damaged and refused: %s", name, detail)
                self._stock.quarantine(place, arrival.key, arrival.source)
            case Miss.FOREIGN:
                if self._stock.set_aside(place, arrival.key):
                    log.warning("%s cannot be read here, nor can others like it: %s", name, detail)
            case Miss.ABSENT:
                self._stock.forget(place, arrival.key, arrival.source)
            case Miss.TIER_FAILED | Miss.TOO_SLOW:
                log.info("%s did not come: %s", name, detail)
                self.metrics.count("kv_tier_errors_total", tier=place.name, verb="read")
                place.reads.failed(detail, at_once=miss is Miss.TOO_SLOW)
