"""The chunk KV store: finds bytes in the fastest tier that has them, and brings them.

    peek     where is it?             changes nothing
    acquire  pin what is still there  → Lease
    load     bring it layer by layer  → Transfer
    save     keep it: in host memory at once, in lower tiers behind the caller's back  → Ticket

Loads land in the host tier if the chunk is worth more than what it would push out (promotion),
otherwise in staging memory that goes with the lease. What leaves the host tier and is nowhere below
is written down first (demotion), unless it is there in part (`in_host.py`). Trouble in a tier is a
miss with a reason and a counter: no method here raises for it.

Threads: every public method may be called from any thread. `peek`, `acquire` and `load` do no IO on
the caller's thread; for keys that are not in the books they wait for the tiers' answer, at most
`locate_deadline_s` per tier.
"""

import logging
import queue
import time
from collections.abc import Collection, Sequence
from functools import partial

from kvweave.kv.config import StoreConfig
from kvweave.kv.deleting import Deleting
from kvweave.kv.finding import Finder
from kvweave.kv.format.objects import PackedChunk
from kvweave.kv.keys import ChunkKey, ContextId
from kvweave.kv.leases import Holds, Lease, Pin
from kvweave.kv.loads import Loads
from kvweave.kv.places import TierSlot, open_places
from kvweave.kv.residency import Miss, Peek, Residency
from kvweave.kv.stock import Stock
from kvweave.kv.tier_lookup import Locator
from kvweave.kv.transfers import Transfer
from kvweave.kv.under_way import UnderWay
from kvweave.kv.writer import SaveTicket
from kvweave.metrics import Metrics

log = logging.getLogger(__name__)


class KVStore(Deleting):
    """See the module. Close it, or use it as a context manager."""

    def __init__(
        self,
        cfg: StoreConfig,
        metrics: Metrics | None = None,
        places: Sequence[TierSlot] | None = None,
    ) -> None:
        """`places` stands in for the tiers of `cfg`: tests put faults in front of one."""
        self.metrics = metrics or Metrics()
        self._cfg = cfg
        opened = open_places(cfg, self.metrics) if places is None else places
        locator = Locator(cfg.locate_deadline_s, self.metrics)
        super().__init__(Stock(cfg, opened, self.metrics), UnderWay(), locator)
        for place in self._stock.places:
            place.pool.on_bug = partial(
                self.metrics.count, "kv_tier_errors_total", tier=place.name, verb="bug"
            )
        self._loads = Loads(cfg, self._stock, self._under_way, self._locator, self.metrics)
        self._finder = Finder(self._stock, self._locator, self._under_way)
        self._orphans: queue.SimpleQueue[Holds] = queue.SimpleQueue()  # of leases never released

    # ---- reading

    def peek(self, keys: Sequence[ChunkKey]) -> list[Peek]:
        """Where each chunk's KV is, in the order asked. Pins nothing, touches nothing."""
        answers = {key: self._finder.peek_books(key) for key in dict.fromkeys(keys)}
        unknown = [key for key, answer in answers.items() if answer is None]
        for key, located in self._finder.locate(unknown).items():
            answers[key] = Peek(Residency.HERE, located.place.name, located.size_bytes)
        absent = Peek(Residency.ABSENT, None, None)
        return [answers[key] or absent for key in keys]

    def confirm(self, keys: Collection[ChunkKey]) -> None:
        """See to it that `peek` is right about these: another process may have deleted them from a
        tier that both use. Blocks on IO, a look at each; for those who would compute what is not
        there. Reading needs none of this: what is gone is a miss."""
        for place in self._stock.below:
            if place.shelf is not None and not place.reads.is_open:
                for key in keys:
                    self._stock.confirm(place, key)

    def acquire(self, keys: Sequence[ChunkKey]) -> Lease:
        """Pin what is there. What is not is in `lease.missing`, with the reason."""
        self._release_orphans()
        unique = list(dict.fromkeys(keys))
        located = self._finder.locate(self._finder.unknown(unique))
        now_s = time.time()
        tiers: dict[ChunkKey, str] = {}
        missing: dict[ChunkKey, Miss] = {}
        holds = Holds({}, [], [])
        with self._lock:
            for key in unique:
                place, entry = self._finder.find(key, located)
                usage = self._stock.usage.touch(key, now_s, entry.size_bytes if entry else 0)
                if place is not None:
                    tiers[key] = place.name
                elif (arriving_from := self._under_way.tier_of(key)) is not None:
                    tiers[key] = arriving_from
                else:
                    missing[key] = self._finder.why_absent(key)
                if place is not None and place.shelf is not None and entry is not None:
                    entry.pins += 1
                    place.shelf.touch(key, usage)
                    holds.pins[key] = Pin(place, entry)
        for miss in missing.values():
            self.metrics.count("kv_misses_total", reason=miss.value)
        return Lease(tiers, missing, holds, self._release, self._orphans.put)

    def load(
        self, lease: Lease, first_layers: Sequence[int] = (), extras: Collection[str] = ()
    ) -> Transfer:
        """Start bringing a lease's chunks. Returns at once; see `Transfer.wait_layer`.

        `first_layers` come before all others, in the order given: a selector scores there before
        the pass begins. The rest comes in order. Of what lies beside the layers only `extras` are
        read, where a chunk has them.
        """
        return self._loads.start(lease, first_layers, frozenset(extras))

    # ---- writing

    def save(
        self, packed: PackedChunk, *, cost_s: float | None = None, wait_s: float = 0.0
    ) -> SaveTicket:
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
        ticket = SaveTicket()
        in_host = self._stock.save_to_host(packed)
        for place in self._stock.below:
            if not self._stock.writers[place.name].offer(packed, ticket, wait_s=wait_s):
                self._stock.count_dropped(place, "write-behind is full")
        ticket.answer("host" if in_host and not self._stock.below else None)
        return ticket

    def give_way(self, context: ContextId) -> None:
        """Chunk KV of this context leaves a full tier before any other and pushes out no other,
        however often it is used: nobody is served from it. For as long as the store is open."""
        self._stock.give_way(context)

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

    def pending_bytes(self) -> dict[str, int]:
        """Bytes that requests wait for, by tier; tiers without any are left out."""
        with self._lock:
            return {tier: size for tier, size in self._under_way.pending_bytes().items() if size}

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
            self._under_way.check_integrity()

    # ---- releasing

    def _release(self, holds: Holds) -> None:
        self._release_orphans()
        self._loads.let_go(holds)

    def _release_orphans(self) -> None:
        while not self._orphans.empty():
            try:
                holds = self._orphans.get_nowait()
            except queue.Empty:
                return
            log.warning("a lease on %d chunks was dropped unreleased; use `with`", len(holds.pins))
            self._loads.let_go(holds)
