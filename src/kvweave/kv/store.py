"""The chunk KV store: finds bytes in the fastest tier that has them, and brings them.

    peek     where is it?             changes nothing
    acquire  pin what is still there  → Lease
    load     bring it layer by layer  → Transfer
    save     keep it: in host memory at once, in lower tiers in the background  → SaveTicket

Loads land in the host tier if the chunk is worth more than what it would push out, otherwise in
staging memory that goes with the lease. What leaves the host tier and is nowhere below is written
down first, unless it is there in part (`saving.py`). Trouble in a tier is a miss with a reason and
a counter: no method here raises for it.

Threads: every public method may be called from any thread. `peek`, `acquire` and `load` do no IO on
the caller's thread; for keys that are not in the books they wait for the tiers' answer, at most
`locate_deadline_s` per tier.
"""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from kvweave.errors import TierError
from kvweave.kv.format.keys import ChunkKey, ContextId, context_of, make_tag
from kvweave.kv.format.objects import PackedChunk
from kvweave.kv.inventory import Inventory, StoreEviction
from kvweave.kv.loading import Loader
from kvweave.kv.lookup import Finder, Locator, Peek, Residency, StockTaker
from kvweave.kv.provenance import Provenance, carries
from kvweave.kv.removal import Remover
from kvweave.kv.saving import Saver
from kvweave.kv.tier_slot import OpenTier, make_slot, open_tiers
from kvweave.kv.tiers import Tier
from kvweave.kv.tiers.config import StoreConfig
from kvweave.kv.transfers import Holds, Lease, Pin, Transfer
from kvweave.kv.writer import SaveTicket
from kvweave.metrics import Metrics
from kvweave.reasons import Reason

log = logging.getLogger(__name__)


class KVStore:
    """Finds chunk KV in its tiers and brings it. Close it, or use it as a context manager.

    `inventory` and `remover` are there to look at a tier, or to take an object out of one alone.
    """

    def __init__(
        self,
        cfg: StoreConfig,
        metrics: Metrics | None = None,
        tiers: Sequence[OpenTier] | None = None,
    ) -> None:
        """`tiers` stand in for those of `cfg`: tests put faults in front of one."""
        self.metrics = metrics or Metrics()
        opened = open_tiers(cfg, self.metrics) if tiers is None else tiers
        slots = [make_slot(each, cfg, self.metrics) for each in opened]
        self.inventory = Inventory(slots, self.metrics)
        self.remover = Remover(self.inventory)
        self._lock = self.inventory.lock
        self._locator = Locator(cfg.locate_deadline_s, self.metrics)
        self._saver = Saver(cfg, self.inventory, self.remover)
        stock = StockTaker(self.inventory, self.remover)
        stock.take_all()
        self._loader = Loader(cfg, self.inventory, self.remover, self._saver, self._locator)
        self._active = self._loader.active
        self._finder = Finder(self.inventory, self._locator, self._active, stock)
        self._orphans: queue.SimpleQueue[Holds] = queue.SimpleQueue()  # of leases never released

    # ---- reading

    def peek(self, keys: Sequence[ChunkKey]) -> list[Peek]:
        """Where each chunk's KV is, in the order asked. Pins nothing, touches nothing."""
        answers = {key: self._finder.peek_books(key) for key in dict.fromkeys(keys)}
        unknown = [key for key, answer in answers.items() if answer is None]
        for key, located in self._finder.locate(unknown).items():
            answers[key] = Peek(Residency.HERE, located.slot.name, located.size_bytes)
        absent = Peek(Residency.ABSENT, None, None)
        return [answers[key] or absent for key in keys]

    def copies(self, keys: Collection[ChunkKey]) -> dict[str, int]:
        """Bytes that local tiers hold of these chunks, by tier; a chunk may have a copy in each.
        Remote tiers are not asked."""
        found: Counter[str] = Counter()
        with self._lock:
            for slot in self.inventory.slots:
                if slot.budget is None:
                    continue
                for key in keys:
                    if (entry := slot.budget.get(key)) is not None:
                        found[slot.name] += entry.size_bytes
        return dict(found)

    def confirm(self, keys: Collection[ChunkKey]) -> None:
        """Make sure that `peek` is right about these: another process may have deleted them from a
        tier that both use. Blocks on IO, a look at each; for a caller that computes what is not
        there. Reading needs none of this: what is gone is a miss."""
        for slot in self.inventory.below:
            if slot.budget is not None and not slot.reads.is_open:
                for key in keys:
                    self.remover.confirm(slot, key)

    def acquire(self, keys: Sequence[ChunkKey]) -> Lease:
        """Pin what is there. What is not is in `lease.missing`, with the reason."""
        self._release_orphans()
        unique = list(dict.fromkeys(keys))
        located = self._finder.locate(self._finder.unknown(unique))
        now_s = time.time()
        tiers: dict[ChunkKey, str] = {}
        missing: dict[ChunkKey, Reason] = {}
        holds = Holds({}, [], [])
        with self._lock:
            for key in unique:
                slot, entry = self._finder.find(key, located)
                usage = self.inventory.usage.touch(key, now_s, entry.size_bytes if entry else 0)
                if slot is not None:
                    tiers[key] = slot.name
                elif (arriving_from := self._active.tier_of(key)) is not None:
                    tiers[key] = arriving_from
                else:
                    missing[key] = self._finder.why_absent(key)
                if slot is not None and slot.budget is not None and entry is not None:
                    entry.pins += 1
                    slot.budget.touch(key, usage)
                    holds.pins[key] = Pin(slot, entry)
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
        return self._loader.start(lease, first_layers, frozenset(extras))

    def warm(self, keys: Sequence[ChunkKey]) -> bool | None:
        """Bring chunks from the tiers below to host memory, as far as it has room. Blocks on IO.

        True: some were brought; False: none lies below; None: there is no room, or no host tier.
        """
        host = self.inventory.host
        if host is None:
            return None
        found = zip(keys, self.peek(keys), strict=True)
        below = [
            (key, peek.size_bytes or 0)
            for key, peek in found
            if peek.residency is Residency.HERE and peek.tier != host.slot.name
        ]
        if not below:
            return False
        with self._lock:
            if sum(size_bytes for _, size_bytes in below) > host.budget.free_bytes:
                return None
        with self.acquire([key for key, _ in below]) as lease:
            transfer = self.load(lease)
            num_layers = max((len(h.layers) for h in transfer.headers().values()), default=0)
            for layer in range(num_layers):
                transfer.wait_layer(layer)
        return True

    # ---- writing

    def save(
        self, packed: PackedChunk, *, cost_s: float | None = None, wait_s: float = 0.0
    ) -> SaveTicket:
        """Keep a chunk's KV: in host memory now if it is worth it, below in the background.

        `cost_s` is what computing it took, the policy's measure of its worth. When a tier's
        write-behind bound is reached, waits up to `wait_s` (ingest gives a long one, serving none)
        and then drops the write, which is counted. Saving twice is harmless.
        """
        with self._lock:
            self.inventory.usage.touch(packed.key, time.time(), packed.header.total_bytes)
            if cost_s is not None:
                tokens = max(1, packed.header.shape.num_tokens)
                self.inventory.usage.record_computation(packed.key, cost_s, tokens)
        ticket = SaveTicket()
        in_host = self._saver.save_to_host(packed)
        for slot in self.inventory.below:
            if not self._saver.writers[slot.name].offer(packed, ticket, wait_s=wait_s):
                self.inventory.count_dropped(slot, "write-behind is full")
        ticket.answer("host" if in_host and not self.inventory.below else None)
        return ticket

    # ---- deleting

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Remove chunks from every tier; leased copies go when their lease does, and so does what
        a load under way brings. Blocks on IO.

        Returns how many of the keys some tier had. A tier that fails is counted.
        """
        had = 0
        for key in dict.fromkeys(keys):
            found = [self._delete_at_hand(key)]  # from now on nothing is written down
            for writer in self._saver.writers.values():
                writer.forget(key)
            self._locator.forget(key)
            found += [self.remover.delete_from(slot, key) for slot in self.inventory.below]
            found.append(self._delete_at_hand(key))  # what a lower tier still gave meanwhile
            had += any(found)
        return had

    def clear(self) -> int:
        """Delete all that local tiers hold; see `delete`."""
        with self._lock:
            keys = {key for budget in self.inventory.budgets() for key in budget}
        return self.delete(keys)

    def keys_at_hand(self, is_wanted: Callable[[Provenance], bool]) -> list[ChunkKey]:
        """What the host tier has of some provenance. Looks at every object there."""
        return [key for key, of in self._saver.host_objects.provenances() if is_wanted(of)]

    def forget(
        self, chunk_ids: Collection[str] | None, contexts: Collection[ContextId] | None = None
    ) -> int:
        """Another process deleted the KV of these chunks, or is about to: remove what the host tier
        has, what this process has written below, and all that was computed behind them. Loads serve
        their leases, and nothing is kept of what those under way bring, nor of what later ones find
        where it was not deleted yet. Blocks on IO; returns as `delete` does.

        None: it is not known which chunks. Then it is those that do not exist (`know_by`). With
        `contexts`, what was computed in others stays.
        """
        removed = self.inventory.removed
        with self._lock:
            removed.add(chunk_ids)
            self._active.disown_all()  # whose text they bring is not known yet
            found = self._saver.written_provenances()
        found += self._saver.host_objects.provenances()
        if chunk_ids is None:
            names = {name for _, of in found for name in (of.chunk, *of.behind)}
            chunk_ids = names.difference(removed.existing(names))
        is_wanted = carries(chunk_ids)
        wanted = [key for key, of in found if is_wanted(of)]
        return self.delete(k for k in wanted if contexts is None or context_of(k) in contexts)

    def delete_chunks(self, chunk_ids: Collection[str]) -> list[ChunkKey]:
        """Remove chunks that are no more: delete their KV from every tier, whoever wrote it and for
        whichever model, preamble and tenant; returns its keys. Blocks on IO: tiers are listed. One
        that fails is counted, and may keep some of it."""
        tags = {tag for each in chunk_ids if (tag := make_tag(each)) is not None}
        found: dict[ChunkKey, None] = {}
        for slot in self.inventory.slots:
            try:
                found.update(dict.fromkeys(slot.tier.tagged_keys(tags)))
            except TierError as error:
                self.metrics.count("kv_tier_errors_total", tier=slot.name, verb="list")
                log.warning("chunk KV that was deleted may be left in %s: %s", slot.name, error)
        self.forget(chunk_ids)  # what is on its way, and what other loads bring
        self.delete(found)
        return list(found)

    def bar(self, chunk_ids: Collection[str]) -> None:
        """Bar chunks that were removed here. What a remote tier still has of them is not served,
        and no copy is kept of what a load under way brings, until they exist again (`know_by`)."""
        self.inventory.removed.add(chunk_ids)

    def remotes(self) -> list[Tier]:
        """The tiers that other machines share, in order."""
        return [slot.tier for slot in self.inventory.slots if slot.tier.remote]

    def clean(self, place: str, work: Callable[[], None]) -> None:
        """Have `work` delete, in the tier of this place, what the store does not know of. See
        `Remover.clean`. Where no tier is there, nobody but the caller waits for it."""
        slot = next((s for s in self.inventory.below if s.tier.place == place), None)
        if slot is None:
            work()
        else:
            self.remover.clean(slot, work)

    def places(self) -> set[str]:
        """The places of the store's tiers."""
        return {slot.tier.place for slot in self.inventory.slots}

    def know_by(self, known: Callable[[Collection[str]], Collection[str]]) -> None:
        """`known` says which of some chunks exist: what is loaded of those is kept, whatever was
        forgotten before. Called on any thread; may block."""
        self.inventory.removed.know_by(known)

    def _delete_at_hand(self, key: ChunkKey) -> bool:
        """Remove a chunk from the host tier, and see to it that no load under way brings it back.
        True: the host tier had it."""
        with self._lock:
            self._active.disown(key)
            return self.remover.delete_from_host(key)

    # ---- the whole

    def give_way(self, context: ContextId) -> None:
        """Chunk KV of this context leaves a full tier before any other and pushes out no other,
        however often it is used: no request is served from it. For as long as the store is open."""
        self.inventory.give_way(context)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until every accepted write was tried. False: some tier is too slow for that."""
        give_up_s = time.monotonic() + timeout_s
        flushed = [
            writer.flush(max(0.0, give_up_s - time.monotonic()))
            for writer in self._saver.writers.values()
        ]
        return all(flushed)

    def writes_hang(self) -> bool:
        """Whether a write to some tier has taken longer than it may: what waits behind it may never
        be written."""
        return any(writer.hangs() for writer in self._saver.writers.values())

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish accepted writes for at most `timeout_s` per tier, then let go of everything. Its
        memory is free when this returns, or with the last lease: who closes a store to open another
        cannot wait for the garbage collector, which does not know how much hangs on an object."""
        for writer in self._saver.writers.values():
            writer.close(timeout_s)
        self._locator.close()
        self.remover.close()
        for slot in self.inventory.slots:
            slot.pool.close(1.0)
        self._loader.close()
        self.remover.empty_host()
        for slot in self.inventory.slots:
            slot.tier.close()

    def __enter__(self) -> "KVStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- numbers

    def used_bytes(self) -> dict[str, int]:
        """Bytes per budgeted tier: kept and promised."""
        with self._lock:
            return {
                slot.name: slot.budget.used_bytes + slot.budget.reserved_bytes
                for slot in self.inventory.slots
                if slot.budget is not None
            }

    def room_bytes(self) -> int | None:
        """Bytes that can still be saved before something has to go, in the roomiest tier that keeps
        what is saved: one below host memory where there is one. None: a tier has no bound of ours.
        """
        with self._lock:
            budgets = [slot.budget for slot in self.inventory.below or self.inventory.slots]
            if None in budgets:
                return None
            return max((b.free_bytes for b in budgets if b is not None), default=0)

    def pending_bytes(self) -> dict[str, int]:
        """Bytes that requests wait for, by tier; tiers without any are left out."""
        with self._lock:
            return {tier: size for tier, size in self._active.pending_bytes().items() if size}

    def capacity_bytes(self) -> dict[str, int | None]:
        """What each tier may hold; None: it has no bound of ours."""
        slots = self.inventory.slots
        return {s.name: None if s.budget is None else s.budget.capacity_bytes for s in slots}

    def evictions(self) -> list[StoreEviction]:
        """The last evictions, oldest first."""
        return list(self.inventory.evictions)

    def num_pinned(self) -> int:
        """Entries some lease holds, over all tiers."""
        with self._lock:
            return sum(budget.num_pinned() for budget in self.inventory.budgets())

    def update_gauges(self) -> None:
        """Write the numbers that change too often to be kept current: call before a scrape."""
        for name, used in self.used_bytes().items():
            self.metrics.gauge("kv_tier_bytes", used, tier=name)
        for name, writer in self._saver.writers.items():
            self.metrics.gauge("kv_write_behind_bytes", writer.pending_bytes, tier=name)
        for slot in self.inventory.slots:
            is_resting = slot.reads.is_open or not slot.is_booked
            self.metrics.gauge("kv_tier_resting", is_resting, tier=slot.name)

    # ---- releasing

    def _release(self, holds: Holds) -> None:
        self._release_orphans()
        self._loader.let_go(holds)

    def _release_orphans(self) -> None:
        while not self._orphans.empty():
            try:
                holds = self._orphans.get_nowait()
            except queue.Empty:
                return
            log.warning("a lease on %d chunks was dropped unreleased; use `with`", len(holds.pins))
            self._loader.let_go(holds)
