"""What an answer teaches: the machine's prices, the tiers' speeds, what loading really cost."""

from kvweave.app.auto.tier_probes import TierProbes
from kvweave.engine.request import Ticket
from kvweave.fuse.record import JOINED, FuseRecord
from kvweave.fuse.recordings import recordings_of
from kvweave.fuse.strategy import Strategy
from kvweave.kv.tree.node import HOST
from kvweave.model.decoder import Decoder
from kvweave.plan.plan import Plan, SpanKind
from kvweave.plan.planner import Planner
from kvweave.plan.profile import GAIN, MachineProfile, tier_of


class Lessons:
    """Moves what plans are priced with. For one thread at a time: `AutoPlanner` holds its lock."""

    def __init__(
        self, decoder: Decoder, machine: MachineProfile, tiers: TierProbes, planner: Planner
    ) -> None:
        self._refusals = recordings_of(decoder).refusals
        self._num_layers = decoder.spec.num_layers
        self._machine = machine
        self._tiers = tiers
        self._planner = planner

    def num_recorded(self) -> int:
        """Recordings of what fused prompts play that were tried so far."""
        return sum(refusals.num_tried for refusals in self._refusals)

    def learn(
        self, plan: Plan, strategy: Strategy, record: FuseRecord, ticket: Ticket, num_recorded: int
    ) -> None:
        """A plan was carried out. `num_recorded` is of the time before it was."""
        if strategy.reuses == "all" and record.strategy != strategy.name:
            return  # a close call: computed twice, so what it took is the price of neither
        timeline, load = ticket.timeline, plan.chosen.load
        took_s = timeline.loading_s + timeline.computing_s
        self.move_prices(strategy, record, took_s, beside=timeline.shared)
        if load is None or not _came_as_planned(load.link, plan, record):
            return
        # and one that recorded something longer than the next one will
        if num_recorded != self.num_recorded() or timeline.preempted:
            return
        if timeline.shared:  # its bytes came before its rows: what it waited for them is its own
            if record.way != JOINED:
                return
            laid_s = self._machine.stitch_s * _num_placed(record)
            took_s = load.work_s + max(0.0, record.stages.load / 1e3 - laid_s)
        beside = timeline.shared or timeline.loading_s > 0  # the latter: it got all of them first
        self._planner.learn_load(plan, took_s, beside=beside)

    def move_prices(
        self, strategy: Strategy, record: FuseRecord, actual_s: float, *, beside: bool = False
    ) -> None:
        """Move the prices towards what just happened. `beside` others a request takes longer than
        alone: it can show that a price is too high, never that it is too low."""
        machine, counts = self._machine, record.counts
        rows = counts["computed"] + counts["recomputed"]
        placed = _num_placed(record)
        for tier, seconds in record.arrived_s.items() if not beside else ():
            self._tiers.came(tier, record.loaded_bytes.get(tier, 0), seconds)
        if not placed:
            most_s = machine.prefill_s(counts["exact"], rows) if beside else actual_s
            machine.saw_exact(counts["exact"], rows, min(actual_s, most_s))
            return
        needs = strategy.needs(self._num_layers)
        if not needs.full_width_layers:  # there the pass has other rows in its first layers
            compute_s = record.stages.compute / 1e3
            # one that leaves early counts as the part of a row that it is priced as
            depth = strategy.depth(self._num_layers)
            rows = counts["computed"] + round(depth * counts["recomputed"])
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
