"""The chunk KV store: finds bytes in the fastest tier that has them, and brings them.

    peek     where is it?             changes nothing
    acquire  pin what is still there  → Lease
    load     bring it layer by layer  → Transfer
    save     keep it: in host memory at once, in lower tiers behind the caller's back  → Ticket

Loads land in the host tier if the chunk is worth more than what it would push out (promotion),
otherwise in staging memory that goes with the lease. What leaves the host tier and is nowhere below
is written down first (demotion). Trouble in a tier is a miss with a reason and a counter: no method
here raises for it.

Threads: every public method may be called from any thread. `peek`, `acquire` and `load` do no IO on
the caller's thread; for keys that are not in the books they wait for the tiers' answer, at most
`locate_deadline_s` per tier.
"""

import logging
import queue
import time
from collections.abc import Iterable, Sequence
from functools import partial

from kvweave.kv.arrivals import Arrival, Hooks, Landing
from kvweave.kv.config import StoreConfig
from kvweave.kv.keys import ChunkKey
from kvweave.kv.layout import Header
from kvweave.kv.locate import Located, Locator
from kvweave.kv.memory import BufferPool
from kvweave.kv.objects import PackedChunk
from kvweave.kv.places import Place, open_places
from kvweave.kv.residency import Miss, Peek, Residency
from kvweave.kv.shelf import Entry
from kvweave.kv.stock import Stock
from kvweave.kv.transfers import Holds, Lease, Pin, Resident, Source, Transfer
from kvweave.kv.writer import Ticket
from kvweave.metrics import Metrics

log = logging.getLogger(__name__)

_STAGING_KEEP_BYTES = 256 << 20  # idle staging buffers kept for the next load


class KVStore:
    """See the module. Close it, or use it as a context manager."""

    def __init__(
        self,
        cfg: StoreConfig,
        metrics: Metrics | None = None,
        places: Sequence[Place] | None = None,
    ) -> None:
        """`places` stands in for the tiers of `cfg`: tests put faults in front of one."""
        self.metrics = metrics or Metrics()
        self._cfg = cfg
        opened = open_places(cfg, self.metrics) if places is None else places
        self._stock = Stock(cfg, opened, self.metrics)
        self._lock = self._stock.lock
        self._by_name = {place.name: place for place in self._stock.places}
        assert len(self._by_name) == len(self._stock.places), "two tiers of one name"
        host = self._stock.host
        self._staging = BufferPool(
            _STAGING_KEEP_BYTES, pinned=host is not None and host.tier.pinned
        )
        for place in self._stock.places:
            place.pool.on_bug = partial(
                self.metrics.count, "kv_tier_errors_total", tier=place.name, verb="bug"
            )
        self._locator = Locator(cfg.locate_deadline_s, self.metrics)
        self._arrivals: dict[ChunkKey, Arrival] = {}  # under way and joinable
        self._keepable: set[Arrival] = set()  # under way, and nobody deleted the chunk since
        self._orphans: queue.SimpleQueue[Holds] = queue.SimpleQueue()  # of leases never released
        self._hooks = Hooks(self._land, self._complete, self._idle, self._arrival_failed)

    # ---- reading

    def peek(self, keys: Sequence[ChunkKey]) -> list[Peek]:
        """Where each chunk's KV is, in the order asked. Pins nothing, touches nothing."""
        answers = {key: self._peek_books(key) for key in dict.fromkeys(keys)}
        unknown = [key for key, answer in answers.items() if answer is None]
        for key, located in self._locate(unknown).items():
            answers[key] = Peek(Residency.HERE, located.place.name, located.size_bytes)
        absent = Peek(Residency.ABSENT, None, None)
        return [answers[key] or absent for key in keys]

    def acquire(self, keys: Sequence[ChunkKey]) -> Lease:
        """Pin what is there. What is not is in `lease.missing`, with the reason."""
        self._release_orphans()
        unique = list(dict.fromkeys(keys))
        unknown = [key for key in unique if self._peek_books(key) is None]
        located = self._locate(unknown)
        now_s = time.time()
        tiers: dict[ChunkKey, str] = {}
        missing: dict[ChunkKey, Miss] = {}
        holds = Holds({}, [], [])
        with self._lock:
            for key in unique:
                place, entry = self._find(key, located)
                usage = self._stock.usage.touch(key, now_s, entry.size_bytes if entry else 0)
                if place is not None:
                    tiers[key] = place.name
                elif key in self._arrivals:
                    tiers[key] = self._arrivals[key].tier_name
                else:
                    missing[key] = self._why_absent(key)
                if place is not None and place.shelf is not None and entry is not None:
                    entry.pins += 1
                    place.shelf.touch(key, usage)
                    holds.pins[key] = Pin(place, entry)
        for miss in missing.values():
            self.metrics.count("kv_misses_total", reason=miss.value)
        return Lease(tiers, missing, holds, self._release, self._orphans.put)

    def load(self, lease: Lease, first_layers: Sequence[int] = ()) -> Transfer:
        """Start bringing a lease's chunks. Returns at once; see `Transfer.wait_layer`.

        `first_layers` come before all others, in the order given: a selector scores there before
        the pass begins. The rest comes in order.
        """
        assert not lease.released, "load of a released lease"
        sources: dict[ChunkKey, Source] = {}
        started: list[Arrival] = []
        with self._lock:
            for key in lease.keys:
                resident = self._resident(lease.holds, key)
                if resident is not None:
                    sources[key] = resident
                    continue
                arrival = self._arrivals.get(key)
                if arrival is None:
                    place = self._by_name[lease.tiers[key]]
                    arrival = Arrival(key, place.tier, place.pool, place.deadline_s, self._hooks)
                    started.append(arrival)
                    pin = lease.holds.pins.get(key)
                    arrival.source = None if pin is None else pin.entry
                    if pin is None or not pin.entry.doomed:  # deleted: for this lease alone
                        self._arrivals[key] = arrival
                        self._keepable.add(arrival)
                else:
                    self.metrics.count("kv_loads_joined_total", tier=arrival.tier_name)
                arrival.users += 1
                lease.holds.arrivals.append(arrival)
                sources[key] = arrival
        # asks before the reads begin: they are cut so that the first layers come alone
        budgets_s = {place.name: place.budget_s for place in self._stock.places}
        transfer = Transfer(lease, sources, budgets_s, self._cfg.lookahead_layers, first_layers)
        for arrival in started:
            self.metrics.count("kv_loads_total", tier=arrival.tier_name)
            arrival.start()
        return transfer

    # ---- writing

    def save(
        self, packed: PackedChunk, *, cost_s: float | None = None, wait_s: float = 0.0
    ) -> Ticket:
        """Keep a chunk's KV: in host memory now if it is worth it, in lower tiers behind.

        `cost_s` is what computing it took, the policy's measure of its worth. When a tier's
        write-behind bound is reached, waits up to `wait_s` (ingest gives a long one, serving none)
        and then drops the write, which is counted. Saving twice is harmless.
        """
        with self._lock:
            self._stock.usage.touch(packed.key, time.time(), packed.header.total_bytes)
            if cost_s is not None:
                tokens = max(1, packed.header.shape.num_tokens)
                self._stock.usage.computed(packed.key, cost_s, tokens)
        ticket = Ticket()
        in_host = self._stock.save_to_host(packed)
        for place in self._stock.below:
            if not self._stock.writers[place.name].offer(packed, ticket, wait_s=wait_s):
                self._stock.count_dropped(place, "write-behind is full")
        ticket.answer("host" if in_host and not self._stock.below else None)
        return ticket

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Remove chunks from every tier; leased copies go when their lease does, and so does what
        a load under way brings. Blocks on IO.

        Returns how many of the keys some tier had. A tier that fails is counted.
        """
        had = 0
        for key in dict.fromkeys(keys):
            found = [self._delete_at_hand(key)]  # from now on nothing is written down
            for writer in self._stock.writers.values():
                writer.forget(key)
            self._locator.forget(key)
            found += [self._stock.delete_from(place, key) for place in self._stock.below]
            found.append(self._delete_at_hand(key))  # what a lower tier still gave meanwhile
            had += any(found)
        return had

    def _delete_at_hand(self, key: ChunkKey) -> bool:
        """Remove a chunk from the host tier, and see to it that no load under way brings it back.
        True: the host tier had it."""
        with self._lock:
            self._arrivals.pop(key, None)
            self._keepable = {a for a in self._keepable if a.key != key}
            return self._stock.delete_from_host(key)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until every accepted write was tried. False: some tier is too slow for that."""
        give_up_s = time.monotonic() + timeout_s
        flushed = [
            writer.flush(max(0.0, give_up_s - time.monotonic()))
            for writer in self._stock.writers.values()
        ]
        return all(flushed)

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish accepted writes for at most `timeout_s` per tier, then let go of everything."""
        for writer in self._stock.writers.values():
            writer.close(timeout_s)
        self._locator.close()
        for place in self._stock.places:
            place.pool.close(1.0)
            place.tier.close()

    def __enter__(self) -> "KVStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- numbers

    def used_bytes(self) -> dict[str, int]:
        """Bytes per budgeted tier: kept and promised."""
        with self._lock:
            return {
                place.name: place.shelf.used_bytes + place.shelf.reserved_bytes
                for place in self._stock.places
                if place.shelf is not None
            }

    def num_pinned(self) -> int:
        """Entries some lease holds, over all tiers."""
        with self._lock:
            shelves = [p.shelf for p in self._stock.places if p.shelf is not None]
            return sum(shelf.num_pinned() for shelf in shelves)

    def update_gauges(self) -> None:
        """Write the numbers that change too often to be kept current: call before a scrape."""
        for name, used in self.used_bytes().items():
            self.metrics.gauge("kv_tier_bytes", used, tier=name)
        for name, writer in self._stock.writers.items():
            self.metrics.gauge("kv_write_behind_bytes", writer.pending_bytes, tier=name)
        for place in self._stock.places:
            self.metrics.gauge("kv_tier_resting", place.reads.is_open, tier=place.name)

    def check_integrity(self) -> None:
        """Raise AssertionError if books and tiers disagree. For a store at rest: no load under way,
        no write pending."""
        self._release_orphans()
        self._stock.check_integrity()
        with self._lock:
            assert all(a.users > 0 for a in self._arrivals.values()), "an arrival nobody uses"

    # ---- finding

    def _peek_books(self, key: ChunkKey) -> Peek | None:
        """What the books say; None where only a tier could tell."""
        with self._lock:
            place, entry = self._find(key, {})
            if place is not None and entry is not None:
                return Peek(Residency.HERE, place.name, entry.size_bytes)
            arrival = self._arrivals.get(key)
            if arrival is not None:
                return Peek(Residency.ARRIVING, arrival.tier_name, None)
        return None

    def _locate(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Located]:
        """Ask the tiers for what is not in the books. The deleted that only await their last lease
        are not looked for: their bytes are still there."""
        shelves = [place.shelf for place in self._stock.places if place.shelf is not None]
        with self._lock:
            entries = {key: [shelf.find(key) for shelf in shelves] for key in keys}
            foreign = frozenset(self._stock.foreign)
        doomed = {k for k, found in entries.items() if any(e and e.doomed for e in found)}
        wanted = [key for key in keys if key not in doomed]
        return self._locator.locate(self._stock.below, wanted, foreign)

    def _find(
        self, key: ChunkKey, located: dict[ChunkKey, Located]
    ) -> tuple[Place | None, Entry | None]:
        """Fastest tier in working order that has a key, with its entry if that tier keeps a shelf.
        Lock is held."""
        for place in self._stock.places:
            entry = place.shelf.get(key) if place.shelf is not None else None
            is_foreign = (place.name, key) in self._stock.foreign
            if entry is not None and not is_foreign and not place.reads.is_open:
                return place, entry
        return (located[key].place, None) if key in located else (None, None)

    def _why_absent(self, key: ChunkKey) -> Miss:
        """Lock is held."""
        for place in self._stock.places:
            if place.reads.is_open and (place.shelf is None or key in place.shelf):
                return Miss.TIER_FAILED
        return Miss.ABSENT

    def _resident(self, holds: Holds, key: ChunkKey) -> Resident | None:
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
        assert entry.header is not None
        assert entry.memory is not None
        return Resident(entry.header, entry.memory)

    # ---- releasing

    def _release(self, holds: Holds) -> None:
        self._release_orphans()
        self._let_go(holds)

    def _release_orphans(self) -> None:
        while not self._orphans.empty():
            try:
                holds = self._orphans.get_nowait()
            except queue.Empty:
                return
            log.warning("a lease on %d chunks was dropped unreleased; use `with`", len(holds.pins))
            self._let_go(holds)

    def _let_go(self, holds: Holds) -> None:
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

    # ---- arrivals: called on IO threads

    def _land(self, arrival: Arrival, header: Header) -> Landing:
        memory = self._stock.room_in_host(arrival.key, header.total_bytes)
        if memory is not None:
            return Landing(memory, stays=True)
        return Landing(self._staging.take(header.total_bytes), stays=False)

    def _complete(self, arrival: Arrival) -> None:
        header, landing = arrival.header, arrival.landing
        assert header is not None
        assert landing is not None
        self.metrics.count("kv_bytes_loaded_total", header.total_bytes, tier=arrival.tier_name)
        self._by_name[arrival.tier_name].reads.succeeded()
        if not landing.stays:
            return
        with self._lock:
            if arrival not in self._keepable:
                return  # deleted meanwhile: the bytes go with the arrival
            entry = self._stock.shelve_in_host(arrival.key, header, landing.memory)
            if entry is None:
                return  # saved by somebody else meanwhile: our copy goes with the arrival
            entry.pins += 1  # one for all users of the arrival; _idle takes it off
            arrival.kept = entry
            if self._arrivals.get(arrival.key) is arrival:
                del self._arrivals[arrival.key]
        self.metrics.count("kv_promotions_total", tier=arrival.tier_name)

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

    def _arrival_failed(self, arrival: Arrival, miss: Miss, detail: str) -> None:
        self.metrics.count("kv_misses_total", reason=miss.value)
        place = self._by_name[arrival.tier_name]
        with self._lock:
            if self._arrivals.get(arrival.key) is arrival:
                del self._arrivals[arrival.key]  # the next request tries afresh
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
                self.metrics.count("kv_tier_errors_total", tier=place.name, verb="read")
                place.reads.failed(detail, at_once=miss is Miss.TOO_SLOW)
