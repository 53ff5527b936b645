"""`reuse="auto"`: the planner, wired to one knowledge base, its model and this machine.

    look  →  plan  →  carry out  →  observe

Plans are made on the engine's thread, from its knowledge tree as it is when a request begins. Part
of the composition root: only `ways.py` uses it.
"""

import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvweave.answering import Note
from kvweave.asking import exact_request
from kvweave.corpus.chunker import make_chunk_id
from kvweave.engine.engine import Engine
from kvweave.engine.prefixes import preamble_ref
from kvweave.engine.request import EngineRequest, LoadCost, Ticket
from kvweave.engine.sampling import Sampling
from kvweave.fuse import captured_probe, recorded_layers
from kvweave.fuse.contexts import digest_ids
from kvweave.fuse.profiles import Profile
from kvweave.fuse.record import FuseRecord
from kvweave.fuse.strategy import ModelFacts, Strategy, open_strategy
from kvweave.kv.tree import ChunkRef
from kvweave.kv.tree.behind import TreeBehind
from kvweave.kv.tree.node import HOST
from kvweave.library import Library
from kvweave.machine import profile_path, save
from kvweave.model.decoder import Decoder
from kvweave.plan.altpath import AlternativePaths
from kvweave.plan.cost import CostModel
from kvweave.plan.ordering import OrderPermission
from kvweave.plan.plan import Decision, Judged, Plan, PlanRequest, SpanKind
from kvweave.plan.planner import Planner
from kvweave.plan.profile import GAIN, MachineProfile, link_name, tier_of
from kvweave.planning_facts import (
    CalibratedGate,
    StoredChunkPeek,
    fusing_strategies,
    strategy_info,
)
from kvweave.prompt import Prompt
from kvweave.seen_chunks import SeenChunks
from kvweave.tier_probes import TierProbes
from kvweave.types import ChunkId


class Planned(NamedTuple):
    """A plan, and the prompt in the order it wants."""

    request: PlanRequest
    plan: Plan
    prompt: Prompt
    elsewhere: frozenset[ChunkId]  # computed here, though the tree has it behind another path


@dataclass(slots=True, eq=False)
class Wish:
    """A prompt whose way is still to be chosen, and where what was chosen is noted."""

    prompt: Prompt
    sampling: Sampling
    eos_ids: Collection[int]
    bound: float
    order: OrderPermission
    note: Note
    # set when its turn comes
    planned: Planned | None = None
    num_recorded: int = 0  # recordings that were tried before it


class Planning:
    """Plans over one knowledge base."""

    def __init__(
        self,
        library: Library,
        decoder: Decoder,
        facts: ModelFacts,
        profile: Profile | None,
        machine: MachineProfile,
        *,
        engine: Engine,
        seen: SeenChunks | None = None,
        tenant: str = "",
    ) -> None:
        """On the engine's thread: plans read its knowledge tree behind the library's preamble,
        which stays there from now on. `machine` is what things cost, moved by what they took;
        `seen` hears which chunks came."""
        encoder = library.encoder
        self._library = library
        self._lock = threading.Lock()  # guards what answers move: prices and accesses
        self._decoder = decoder
        of_layers = recorded_layers.recordings_of(decoder)
        self._recordings = of_layers, captured_probe.recordings_of(decoder)
        self._facts = facts
        self._path = profile_path(decoder)
        self.machine = machine
        engine.price(self.machine.prefill.at)
        self._peek = StoredChunkPeek(encoder, library.store)
        table = None
        if profile is not None:
            preamble = digest_ids(encoder.preamble_ids)
            table = profile.table(decoder.revision, encoder.encoding_context, preamble)
        self._strategies, unavailable = fusing_strategies(facts)
        self._seen = seen
        tree = _tree(engine, library, tenant)
        self._paths = AlternativePaths(tree, self._peek.has_copy)
        self._tiers = TierProbes(
            library.store, decoder.spec.num_layers, encoder.context.codec, self.machine.links
        )
        self._planner = Planner(
            tree,
            CostModel(self.machine, layer0_free=False),  # layer 0 is stored and loaded like others
            self._peek,
            gate=CalibratedGate(table),
            unavailable=unavailable,
            pending_bytes=library.store.pending_bytes,
        )

    def close(self) -> None:
        """Keep what was learnt of the machine."""
        save(self.machine, self._path)

    def plan(self, prompt: Prompt, bound: float, order: OrderPermission) -> Planned:
        """What would be done for a prompt. Computes nothing, but has one chunk loaded from a tier
        whose speed is not known, and waits a moment for that."""
        with self._lock:
            return self._plan(prompt, bound, order)

    def _plan(self, prompt: Prompt, bound: float, order: OrderPermission) -> Planned:
        chunks = _named(prompt)
        self._peek.look_at(chunks)
        self._tiers.meet(self._peek.found())
        encoder, stitch_s = self._library.encoder, self.machine.stitch_s
        self._planner.strategies = tuple(
            strategy_info(strategy, encoder, stitch_s) for strategy in self._strategies.values()
        )
        request = PlanRequest(
            tuple(ChunkRef(name, len(ids)) for name, ids in chunks.items()),
            len(prompt.question),
            order,
            quality_bound=bound,
            history=tuple(ChunkRef(make_chunk_id(ids), len(ids)) for ids in prompt.history),
            in_history=tuple(ChunkRef(make_chunk_id(ids), len(ids)) for ids in prompt.left_out),
        )
        plan = self._planner.plan(request)
        ordered = tuple(chunks[chunk.id] for chunk in plan.order)
        path = [part.id for part in (*request.history, *plan.order)]
        elsewhere = self._paths.only_elsewhere(path) & chunks.keys()
        return Planned(request, plan, replace(prompt, chunks=ordered), frozenset(elsewhere))

    def request(self, wish: Wish) -> EngineRequest:
        """The cheapest plan of a wish, as a request. On the engine thread, right before it runs."""
        planned = self.plan(wish.prompt, wish.bound, wish.order)
        plan = planned.plan
        wish.planned, wish.num_recorded = planned, self._num_recorded()
        strategy = self._strategy(plan)
        if strategy.reuses != "all":
            use_tree = strategy.reuses == "exact"
            return exact_request(planned.prompt, wish.sampling, wish.eos_ids, use_tree=use_tree)
        return self._library.request(
            planned.prompt,
            wish.sampling,
            wish.eos_ids,
            strategy,
            plan.chosen.ratio or 0.0,
            computed=_computed(plan),
            use_tree=True,
            expected=self._expected(plan),
        )

    def observe(self, wish: Wish, ticket: Ticket) -> None:
        """The first token of a wish is there: note what was done, and learn from it."""
        planned, record, timeline = wish.planned, ticket.record, ticket.timeline
        assert planned is not None, "what answers was planned"
        plan = planned.plan
        predicted_s = plan.chosen.predicted_s
        assert predicted_s is not None, "what is chosen has a price"
        actual_s = timeline.loading_s + timeline.computing_s
        wish.note.decision = Decision(plan, Judged(plan.chosen.name, predicted_s, actual_s))
        assert record is not None, "a prompt that is through has a record"
        wish.note.keep(record)
        wish.note.laid(planned.prompt)
        if self._seen is not None:
            prompt = planned.prompt
            self._seen.saw(prompt.chunks, planned.elsewhere, as_of=prompt.as_of)
        with self._lock:
            if not timeline.shared:  # a step in company took longer than this request alone
                self._observe(self._strategy(plan), record, actual_s)
                # and one that recorded something longer than the next one will
                if _came_as_planned(plan, record) and wish.num_recorded == self._num_recorded():
                    self._planner.took(plan, actual_s)
            self._planner.finished(planned.request, plan)

    def _expected(self, plan: Plan) -> LoadCost:
        """How long the chosen way loads and computes, by the machine's profile."""
        load_s = 0.0
        for span in plan.spans:
            name = link_name(span.tier, span.codec)
            link = self.machine.link(name) if span.tier else None
            if link is not None and span.kind is SpanKind.FUSED:
                load_s += span.load_bytes / link.bytes_per_s
        total = sum(span.num_tokens for span in plan.spans)
        return LoadCost(load_s, self.machine.recompute.at(total, plan.chosen.rows))

    def _num_recorded(self) -> int:
        """Recordings of what fused prompts play that were tried so far."""
        return sum(recordings.refusals.num_tried for recordings in self._recordings)

    def _strategy(self, plan: Plan) -> Strategy:
        if plan.strategy is not None:
            return self._strategies[plan.strategy]
        return open_strategy(plan.chosen.name, self._facts)

    def _observe(self, strategy: Strategy, record: FuseRecord, actual_s: float) -> None:
        """Move the prices towards what just happened."""
        machine, counts = self.machine, record.counts
        rows = counts["computed"] + counts["recomputed"]
        placed = sum(chunk.num_tokens for chunk in record.chunks if chunk.tier is not None)
        for tier, seconds in record.arrived_s.items():
            self._tiers.came(tier, record.loaded_bytes.get(tier, 0), seconds)
        if not placed:
            machine.prefill.observe(counts["exact"], rows, actual_s)
            return
        needs = strategy.needs(self._decoder.spec.num_layers)
        if not needs.full_width_layers:  # there the pass has other rows in its first layers
            compute_s = record.stages.compute / 1e3
            machine.recompute.observe(len(record.token_ids), rows, compute_s)
        # nothing was waited for: all of it decoding. What host copies lacked comes from below
        if set(record.loaded_bytes) == {HOST.value} and not record.arrived_s:
            laid_s = record.stages.load / 1e3 / placed
            machine.stitch_s += GAIN * (laid_s - machine.stitch_s)


def _named(prompt: Prompt) -> dict[ChunkId, tuple[int, ...]]:
    """Chunks by id, in prompt order. One that is there twice has two names: both stay."""
    named: dict[ChunkId, tuple[int, ...]] = {}
    for place, ids in enumerate(prompt.chunks):
        name = make_chunk_id(ids)
        named[ChunkId(f"{name}@{place}") if name in named else name] = ids
    return named


def _computed(plan: Plan) -> dict[int, str]:
    """Places of the chunks that the plan computes, and why. The history is not among them."""
    chunks = [span for span in plan.spans if span.chunk_id is not None and not span.in_history]
    return {
        place: str(span.reason)
        for place, span in enumerate(chunks)
        if span.kind is SpanKind.COMPUTED
    }


def _came_as_planned(plan: Plan, record: FuseRecord) -> bool:
    """Whether what the plan pays for was loaded from where it thought: not lost on the way, nor
    brought nearer for somebody else."""
    load = plan.chosen.load
    if load is None:
        return False
    tier = tier_of(load.link)
    fused = (s for s in plan.spans if s.kind is SpanKind.FUSED and s.tier == tier)
    return record.loaded_bytes.get(tier, 0) >= sum(span.load_bytes for span in fused) > 0


def _tree(engine: Engine, library: Library, tenant: str) -> TreeBehind:
    """The engine's tree as plans for this knowledge base see it."""
    preamble = library.encoder.preamble  # computed here if it never was
    engine.pin_preamble(preamble, tenant)
    return TreeBehind(engine.tree, preamble_ref(preamble.token_ids, tenant))
