"""What becomes of bytes that arrive: where they land, whether they stay, what their failure means.

They land in the host tier if the chunk is worth more than what it would push out (promotion),
otherwise in staging memory that goes with the lease.
"""

import logging

import torch

from kvweave.kv.arrivals import Arrival, Hooks
from kvweave.kv.awaited import Landing
from kvweave.kv.config import StoreConfig
from kvweave.kv.format.header import Header
from kvweave.kv.memory import BufferPool
from kvweave.kv.provenance import provenance_in
from kvweave.kv.residency import Miss
from kvweave.kv.stock import Stock
from kvweave.kv.tier_lookup import Locator
from kvweave.kv.under_way import UnderWay
from kvweave.metrics import Metrics

log = logging.getLogger(__name__)


class Landings:
    """Called on IO threads, through `hooks`. Takes the stock's lock itself."""

    def __init__(
        self,
        cfg: StoreConfig,
        stock: Stock,
        under_way: UnderWay,
        locator: Locator,
        metrics: Metrics,
    ) -> None:
        self._stock = stock
        self._under_way = under_way
        self._locator = locator
        self._metrics = metrics
        self._lock = stock.lock
        self._by_name = {place.name: place for place in stock.places}
        host = stock.host
        pinned = torch.cuda.is_available() if host is None else host.tier.pinned
        self._staging = BufferPool(cfg.staging_bytes, pinned=pinned)
        self.hooks = Hooks(self._land, self._complete, self._fill, self._idle, self._failed)

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
        self._metrics.count("kv_bytes_loaded_total", num_bytes, tier=arrival.tier_name)
        self._by_name[arrival.tier_name].reads.succeeded()
        since = 0 if arrival.source is None else arrival.source.since
        of = provenance_in(header, landing.memory)
        if landing.stays and not self._stock.gone.covers(of, since):
            self._keep(arrival, header, landing)
        self._put_aside(arrival)

    def _keep(self, arrival: Arrival, header: Header, landing: Landing) -> None:
        """Make an object of the host tier of it."""
        with self._lock:
            if not self._under_way.keeps(arrival):
                return  # deleted meanwhile, or damaged: the bytes go with the arrival
            lacks = frozenset(header.extras) - arrival.held
            origin = arrival.tier_name
            entry = self._stock.shelve_in_host(arrival.key, header, landing.memory, lacks, origin)
            if entry is None:
                return  # saved by somebody else meanwhile: our copy goes with the arrival
            entry.pins += 1  # one for all users of the arrival; _idle takes it off
            arrival.kept = entry
            self._under_way.shut(arrival)
        self._metrics.count("kv_promotions_total", tier=arrival.tier_name)

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
        self._metrics.count("kv_bytes_loaded_total", len(data), tier=arrival.tier_name)
        self._by_name[arrival.tier_name].reads.succeeded()

    def _idle(self, arrival: Arrival) -> None:
        """No read is under way. If no lease uses the arrival either, its memory goes."""
        host = self._stock.host
        with self._lock:
            if arrival.users > 0 or arrival.disposed:
                return
            arrival.disposed = True
            self._under_way.end(arrival)
            landing, entry = arrival.landing, arrival.kept
            doomed = False
            if entry is not None:
                assert host is not None
                doomed = self._stock.unpin(host.place, arrival.key, entry)
        arrival.close_reader()
        self._put_aside(arrival)
        if entry is not None:
            if doomed and host is not None:
                self._stock.finish_delete(host.place, arrival.key, entry)
        elif landing is not None and landing.stays:
            self._stock.give_back_host(landing.memory)
        elif landing is not None:
            self._staging.give_back(landing.memory)

    def _failed(self, arrival: Arrival, miss: Miss, detail: str) -> None:
        """It will not come, or an extra of it, which those who want no such extra need not know. A
        damaged object goes in either case, so that the chunk is computed and saved whole."""
        self._metrics.count("kv_misses_total", reason=miss.value)
        place = self._by_name[arrival.tier_name]
        with self._lock:
            self._under_way.shut(arrival)
            if miss is Miss.CORRUPT:
                arrival.damaged = True
                self._under_way.end(arrival)
            if arrival.kept is not None and miss in (Miss.CORRUPT, Miss.ABSENT):
                self._stock.give_up_part(arrival.key, arrival.kept)
        self._locator.forget(arrival.key)
        name = f"{arrival.key.hex()[:16]}… in {place.name}"
        match miss:
            case Miss.CORRUPT:
                log.warning("%s is damaged and refused: %s", name, detail)
                # an open file can be read wherever it is put, an object of a server cannot
                is_read_on = arrival.failure is None and arrival.whole() is None
                if not (place.tier.remote and is_read_on):
                    self._put_aside(arrival)
            case Miss.FOREIGN:
                if self._stock.set_aside(place, arrival.key):
                    log.warning("%s cannot be read here, nor can others like it: %s", name, detail)
            case Miss.ABSENT:
                self._stock.forget(place, arrival.key, arrival.source)
            case Miss.TIER_FAILED | Miss.TOO_SLOW:
                log.info("%s did not come: %s", name, detail)
                self._metrics.count("kv_tier_errors_total", tier=place.name, verb="read")
                place.reads.failed(detail, at_once=miss is Miss.TOO_SLOW)

    def _put_aside(self, arrival: Arrival) -> None:
        """Take what an arrival was read from out of sight if it is damaged. Once."""
        with self._lock:
            is_due = arrival.damaged and not arrival.put_aside
            arrival.put_aside |= is_due
        if is_due:
            place = self._by_name[arrival.tier_name]
            self._stock.quarantine(place, arrival.key, arrival.source)
