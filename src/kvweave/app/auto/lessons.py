"""What moves the prices of plans: answers, and probes of tiers that nothing came from yet."""

import threading
import time
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field

from kvweave.engine.request import Ticket
from kvweave.fuse.record import JOINED, FuseRecord
from kvweave.fuse.strategy import Strategy
from kvweave.kernels.recording import num_first_times
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.lookup import Peek
from kvweave.kv.store import KVStore
from kvweave.kv.tree.node import DEVICE, HOST
from kvweave.model.decoder import Decoder
from kvweave.plan.loading_cost import PaidShares
from kvweave.plan.plan import Plan, SpanKind
from kvweave.plan.planner import Planner
from kvweave.plan.profile import GAIN, MachineProfile, TierLink, link_name, tier_of

WAIT_S = 0.25  # a plan waits for tiers it meets for the first time, all together
STALE_S = 3600.0  # a tier that nothing came from for this long is measured again
FIRST_REST_S, LONGEST_REST_S = 5.0, 600.0  # after a failure, and after many


@dataclass(slots=True)
class _Probe:
    """A load under way. Written by its thread until `done` is set, then read by the owner."""

    link: TierLink | None = None  # None: it failed
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Rest:
    """A tier that failed: left alone until then."""

    until_s: float
    length_s: float


class TierProbes:
    """Loads one chunk from a tier whose speed is not known. For one thread at a time: `AutoPlanner`
    holds its lock.

    A probe runs on a thread of its own and ends by the store's own deadlines, so a hung tier holds
    up no request: planning waits a moment for a tier that was never met and otherwise goes on
    without it. A probe that failed is remembered, and each failure doubles the time until the next.
    """

    def __init__(
        self,
        store: KVStore,
        num_layers: int,
        codec: str,
        links: MutableMapping[str, TierLink],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._num_layers = num_layers
        self._codec = codec
        self._links = links
        self._now_s = now_s
        self._running: dict[str, _Probe] = {}
        self._resting: dict[str, _Rest] = {}

    def meet(self, found: Iterable[tuple[ChunkKey, Peek]]) -> None:
        """Make the speed of the tiers that these chunks lie in known, now or before long.

        A tier known for long is measured again behind the caller's back: one that was too slow is
        left alone by every plan and would never be found to have recovered.
        """
        self._collect()
        unknown: list[_Probe] = []
        for key, peek in found:
            tier = peek.tier
            if tier in (None, HOST, DEVICE) or self._is_fresh(tier) or self._rests(tier):
                continue
            if tier not in self._running:
                self._running[tier] = self._start(key, tier)
            if self._link(tier) is None:
                unknown.append(self._running[tier])
        give_up_s = time.monotonic() + WAIT_S
        for probe in unknown:
            probe.done.wait(max(0.0, give_up_s - time.monotonic()))
        self._collect()

    def note_load(self, tier: str, size_bytes: int, seconds: float) -> None:
        """Measure a tier by the bytes that came for a request."""
        link = self._links.get(link_name(tier, self._codec))
        if link is not None and size_bytes:
            link.observe(size_bytes, seconds)
            link.seen_s = self._now_s()

    def _start(self, key: ChunkKey, tier: str) -> _Probe:
        probe = _Probe()

        def load() -> None:
            try:
                probe.link = self._load(key, tier)
            finally:
                probe.done.set()

        threading.Thread(target=load, name=f"probe-{tier}", daemon=True).start()
        return probe

    def _load(self, key: ChunkKey, tier: str) -> TierLink | None:
        with self._store.acquire([key]) as lease:
            transfer = self._store.load(lease)
            for layer in range(self._num_layers):
                transfer.wait_layer(layer)
            sizes = list(transfer.sizes().values())
            seconds = transfer.seconds().get(tier, 0.0)
        if not sizes or seconds <= 0 or transfer.lost:
            return None
        now_s = self._now_s()
        paid, beside = PaidShares(at_s=now_s), PaidShares(at_s=now_s)
        return TierLink(sizes[0] / seconds, seen_s=now_s, paid=paid, paid_beside=beside)

    def _collect(self) -> None:
        """Take over what finished probes found."""
        for tier, probe in list(self._running.items()):
            if not probe.done.is_set():
                continue
            del self._running[tier]
            if probe.link is not None:
                known = self._links.get(name := link_name(tier, self._codec))
                if known is not None:
                    # a probe loads: what requests pay it cannot tell
                    probe.link.paid, probe.link.paid_beside = known.paid, known.paid_beside
                self._links[name] = probe.link
                self._resting.pop(tier, None)
                continue
            before = self._resting.get(tier)
            length_s = min(2 * before.length_s, LONGEST_REST_S) if before else FIRST_REST_S
            self._resting[tier] = _Rest(self._now_s() + length_s, length_s)

    def _link(self, tier: str) -> TierLink | None:
        return self._links.get(link_name(tier, self._codec)) or self._links.get(tier)

    def _is_fresh(self, tier: str) -> bool:
        link = self._link(tier)
        return link is not None and self._now_s() - link.seen_s < STALE_S

    def _rests(self, tier: str) -> bool:
        rest = self._resting.get(tier)
        return rest is not None and self._now_s() < rest.until_s


class Lessons:
    """Moves the machine's prices, the tiers' speeds and what loading really cost by what answers
    took. For one thread at a time: `AutoPlanner` holds its lock."""

    def __init__(
        self, decoder: Decoder, machine: MachineProfile, tiers: TierProbes, planner: Planner
    ) -> None:
        self._num_layers = decoder.spec.num_layers
        self._machine = machine
        self._tiers = tiers
        self._planner = planner

    def learn(
        self, plan: Plan, strategy: Strategy, record: FuseRecord, ticket: Ticket, first_times: int
    ) -> None:
        """A plan was carried out. `first_times`: how many there had been before it was. One more
        took what no answer will pay again, so nothing is learnt."""
        if first_times != num_first_times():
            return
        if strategy.reuses == "all" and record.strategy != strategy.name:
            return  # a close call: computed twice, so what it took is the price of neither
        timeline, load = ticket.timeline, plan.chosen.load
        took_s = timeline.loading_s + timeline.computing_s
        if not (timeline.preempted or timeline.shared):
            self._note_unpriced(plan, strategy, record, took_s)
        self.move_prices(strategy, record, took_s, beside=timeline.shared)
        is_as_planned = load is not None and _came_as_planned(load.link, plan, record)
        if load is None or not is_as_planned or timeline.preempted:
            return
        if timeline.shared:  # its bytes came before its rows: what it waited for them is its own
            if record.way != JOINED:
                return
            laid_s = self._machine.stitch_s * _num_placed(record)
            took_s = load.work_s + max(0.0, record.stages.load / 1e3 - laid_s)
        beside = timeline.shared or timeline.loading_s > 0  # the latter: it got all of them first
        self._planner.learn_load(plan, took_s, beside=beside)

    def _note_unpriced(
        self, plan: Plan, strategy: Strategy, record: FuseRecord, took_s: float
    ) -> None:
        """Note what a fused answer took that is neither loading nor its rows, beyond its price."""
        price_s, load, machine = plan.chosen.predicted_s, plan.chosen.load, self._machine
        full_width = strategy.needs(self._num_layers).full_width_layers  # priced apart from rows
        if price_s is None or full_width or not _num_placed(record):
            return
        stages, work_s = record.stages, price_s if load is None else load.work_s
        rows_s = machine.recompute.at(len(record.token_ids), self._paid_rows(strategy, record))
        beside_rows_s = took_s - (stages.load + stages.compute) / 1e3
        priced_s = work_s - rows_s - machine.unpriced_s
        machine.saw_unpriced(beside_rows_s - max(0.0, priced_s), work_s)

    def _paid_rows(self, strategy: Strategy, record: FuseRecord) -> int:
        """Rows of a fused answer; one that leaves early counts as the part that it is priced as."""
        counts = record.counts
        return counts["computed"] + round(strategy.depth(self._num_layers) * counts["recomputed"])

    def move_prices(
        self, strategy: Strategy, record: FuseRecord, actual_s: float, *, beside: bool = False
    ) -> None:
        """Move the prices towards what just happened. `beside` others a request takes longer than
        alone: it can show that a price is too high, never that it is too low."""
        machine, counts = self._machine, record.counts
        rows = counts["computed"] + counts["recomputed"]
        placed = _num_placed(record)
        for tier, seconds in record.arrived_s.items() if not beside else ():
            self._tiers.note_load(tier, record.loaded_bytes.get(tier, 0), seconds)
        if not placed:
            most_s = machine.prefill_s(counts["exact"], rows) if beside else actual_s
            machine.saw_exact(counts["exact"], rows, min(actual_s, most_s))
            return
        needs = strategy.needs(self._num_layers)
        if not needs.full_width_layers:  # there the pass has other rows in its first layers
            compute_s = record.stages.compute / 1e3
            rows = self._paid_rows(strategy, record)
            total = len(record.token_ids)
            most_s = machine.recompute.at(total, rows) if beside else compute_s
            machine.saw_fused(total, rows, min(compute_s, most_s))
        if beside:
            return
        # nothing was waited for: all of it decoding. What host copies lacked comes from below
        if set(record.loaded_bytes) == {HOST.value} and not record.arrived_s:
            laid_s = record.stages.load / 1e3 / placed
            machine.stitch_s += GAIN * (laid_s - machine.stitch_s)


def _num_placed(record: FuseRecord) -> int:
    """Tokens that were laid from stored KV."""
    return sum(chunk.num_tokens for chunk in record.chunks if chunk.tier is not None)


def _came_as_planned(link: str, plan: Plan, record: FuseRecord) -> bool:
    """Whether what the plan pays for was loaded from where it thought: not lost on the way, nor
    brought nearer for another request."""
    tier = tier_of(link)
    fused = (s for s in plan.spans if s.kind is SpanKind.FUSED and s.tier == tier)
    return record.loaded_bytes.get(tier, 0) >= sum(span.load_bytes for span in fused) > 0
