"""From a lease to a transfer, and back.

Ten requests for one chunk share one arrival (`under_way.py`). What a copy in host memory lacks for
a load is brought by a completion, which is shared alike. What becomes of the bytes is decided in
`landings.py`.
"""

from collections.abc import Sequence

from kvweave.kv.arrivals import Arrival
from kvweave.kv.completion import Completion
from kvweave.kv.config import StoreConfig
from kvweave.kv.keys import ChunkKey
from kvweave.kv.landings import Landings
from kvweave.kv.leases import Holds, Lease, Pin
from kvweave.kv.residency import Miss
from kvweave.kv.sources import Resident, Source
from kvweave.kv.stock import Stock
from kvweave.kv.tier_budget import TierEntry
from kvweave.kv.tier_lookup import Locator
from kvweave.kv.transfers import Transfer
from kvweave.kv.under_way import UnderWay
from kvweave.metrics import Metrics


class Loads:
    """Thread-safe: the stock's lock covers what is in here, and what is under way."""

    def __init__(
        self,
        cfg: StoreConfig,
        stock: Stock,
        under_way: UnderWay,
        locator: Locator,
        metrics: Metrics,
    ) -> None:
        self._cfg = cfg
        self._stock = stock
        self.metrics = metrics
        self._lock = stock.lock
        self._by_name = {place.name: place for place in stock.places}
        assert len(self._by_name) == len(stock.places), "two tiers of one name"
        self._under_way = under_way
        self._hooks = Landings(cfg, stock, under_way, locator, metrics).hooks

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
                arrival = self._under_way.get(key)
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
            self._under_way.add(arrival, is_kept=True)
        return arrival

    def _complete_entry(self, key: ChunkKey, entry: TierEntry) -> Arrival:
        """What brings the extras that an object in host memory lacks. Lock is held."""
        place = self._by_name[entry.origin]
        work = Completion(key, entry, place.tier, place.pool, place.deadline_s, self._hooks)
        work.source = None if place.shelf is None else place.shelf.find(key)
        entry.pins += 1  # until no IO thread writes there: _idle takes it off
        if not entry.doomed:
            self._under_way.add(work, is_kept=False)  # it is there already
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
                    self._under_way.shut(arrival)
                    unused.append(arrival)
        for arrival in unused:
            arrival.cancel()  # ends in _idle, now or when its last read returns
        for key, pin in doomed:
            self._stock.finish_delete(pin.place, key, pin.entry)

    def _in_host(self, holds: Holds, key: ChunkKey) -> TierEntry | None:
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
