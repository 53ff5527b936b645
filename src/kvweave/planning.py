"""`reuse="auto"`: the planner, wired to one knowledge base, its model and this machine.

    look  →  plan  →  carry out  →  observe

Plans are made on the engine's thread, from its knowledge tree as it is when a request begins. Part
of the composition root: only `app.py` uses it.
"""

import threading
import time
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
from kvweave.fuse.contexts import digest_ids
from kvweave.fuse.profiles import Profile
from kvweave.fuse.record import FuseRecord
from kvweave.fuse.strategy import ModelFacts, Strategy, open_strategy
from kvweave.kv.tree import ChunkRef
from kvweave.kv.tree.behind import TreeBehind
from kvweave.kv.tree.node import HOST
from kvweave.library import Library
from kvweave.machine import Say, open_machine, profile_path, save, say_on_stderr
from kvweave.model.decoder import Decoder
from kvweave.plan.cost import CostModel
from kvweave.plan.ordering import OrderPermission
from kvweave.plan.plan import Decision, Judged, Plan, PlanRequest, SpanKind
from kvweave.plan.planner import Planner
from kvweave.plan.profile import GAIN, Link
from kvweave.planning_facts import (
    CalibratedGate,
    StoredChunkPeek,
    fusing_strategies,
    strategy_info,
)
from kvweave.prompt import Prompt
from kvweave.types import ChunkId

STALE_S = 3600.0  # a tier that nothing came from for this long is measured again


class Planned(NamedTuple):
    """A plan, and the prompt in the order it wants."""

    request: PlanRequest
    plan: Plan
    prompt: Prompt


@dataclass(slots=True, eq=False)
class Wish:
    """A prompt whose way is still to be chosen, and where what was chosen is noted."""

    prompt: Prompt
    sampling: Sampling
    eos_ids: Collection[int]
    bound: float
    order: OrderPermission
    note: Note
    planned: Planned | None = None  # set when its turn comes


class Planning:
    """Plans over one knowledge base. Opening it may measure the machine: seconds."""

    def __init__(
        self,
        library: Library,
        decoder: Decoder,
        facts: ModelFacts,
        profile: Profile | None,
        *,
        say: Say = say_on_stderr,
        engine: Engine,
    ) -> None:
        """On the engine's thread: plans read its knowledge tree behind the library's preamble,
        which stays there from now on. `say` hears a line when something takes a while."""
        encoder = library.encoder
        self._library = library
        self._lock = threading.Lock()  # guards what answers move: prices and accesses
        self._decoder = decoder
        self._facts = facts
        self._path = profile_path(decoder)
        self.machine = open_machine(decoder, encoder.context.codec, say)
        self._peek = StoredChunkPeek(encoder, library.store)
        table = None
        if profile is not None:
            preamble = digest_ids(encoder.preamble_ids)
            table = profile.table(decoder.revision, encoder.encoding_context, preamble)
        self._strategies = fusing_strategies(facts)
        self._planner = Planner(
            _tree(engine, library),
            CostModel(self.machine, layer0_free=False),  # layer 0 is stored and loaded like others
            self._peek,
            gate=CalibratedGate(table),
        )

    def close(self) -> None:
        """Keep what was learnt of the machine."""
        save(self.machine, self._path)

    def plan(self, prompt: Prompt, bound: float, order: OrderPermission) -> Planned:
        """What would be done for a prompt. Computes nothing, but loads one chunk of a tier whose
        speed is not known."""
        with self._lock:
            return self._plan(prompt, bound, order)

    def _plan(self, prompt: Prompt, bound: float, order: OrderPermission) -> Planned:
        chunks = _named(prompt)
        self._peek.look_at(chunks)
        self._meet_tiers()
        encoder, stitch_s = self._library.encoder, self.machine.stitch_s
        self._planner.strategies = tuple(
            strategy_info(strategy, encoder, stitch_s) for strategy in self._strategies.values()
        )
        request = PlanRequest(
            tuple(ChunkRef(name, len(ids)) for name, ids in chunks.items()),
            len(prompt.question),
            order,
            quality_bound=bound,
        )
        plan = self._planner.plan(request)
        ordered = tuple(chunks[chunk.id] for chunk in plan.order)
        return Planned(request, plan, replace(prompt, chunks=ordered))

    def request(self, wish: Wish) -> EngineRequest:
        """The cheapest plan of a wish, as a request. On the engine thread, right before it runs."""
        planned = self.plan(wish.prompt, wish.bound, wish.order)
        plan = planned.plan
        wish.planned = planned
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
        with self._lock:
            if not timeline.shared:  # a step in company took longer than this request alone
                self._observe(self._strategy(plan), record, actual_s)
            self._planner.finished(planned.request, plan)

    def _expected(self, plan: Plan) -> LoadCost:
        """How long the chosen way loads and computes, by the machine's profile."""
        load_s = 0.0
        for span in plan.spans:
            link = self.machine.link(span.tier) if span.tier else None
            if link is not None and span.kind is SpanKind.FUSED:
                load_s += span.load_bytes / link.bytes_per_s
        total = sum(span.num_tokens for span in plan.spans)
        return LoadCost(load_s, self.machine.recompute.at(total, plan.chosen.rows))

    def _strategy(self, plan: Plan) -> Strategy:
        if plan.strategy is not None:
            return self._strategies[plan.strategy]
        return open_strategy(plan.chosen.name, self._facts)

    def _meet_tiers(self) -> None:
        """Load one chunk from every tier whose speed nobody knows, or has seen for long: one that
        was too slow is left alone by every plan and would never be found to have recovered."""
        links, store = self.machine.links, self._library.store
        for key, peek in self._peek.found():
            if peek.tier is None or peek.tier == HOST or self._is_known(peek.tier):
                continue
            with store.acquire([key]) as lease:
                transfer = store.load(lease)
                for layer in range(self._decoder.spec.num_layers):
                    transfer.wait_layer(layer)
                sizes = [header.total_bytes for header in transfer.headers().values()]
                seconds = transfer.seconds().get(peek.tier, 0.0)
            if sizes and seconds > 0 and not transfer.lost:
                links[peek.tier] = Link(sizes[0] / seconds, seen_s=time.time())

    def _is_known(self, tier: str) -> bool:
        link = self.machine.link(tier)
        return link is not None and time.time() - link.seen_s < STALE_S

    def _observe(self, strategy: Strategy, record: FuseRecord, actual_s: float) -> None:
        """Move the prices towards what just happened."""
        machine, counts = self.machine, record.counts
        rows = counts["computed"] + counts["recomputed"]
        placed = sum(chunk.num_tokens for chunk in record.chunks if chunk.tier is not None)
        for tier, seconds in record.arrived_s.items():
            if tier in machine.links:
                machine.links[tier].observe(record.loaded_bytes.get(tier, 0), seconds)
                machine.links[tier].seen_s = time.time()
        if not placed:
            machine.prefill.observe(counts["exact"], rows, actual_s)
            return
        needs = strategy.needs(self._decoder.spec.num_layers)
        if not needs.full_width_layers:  # there the pass has other rows in its first layers
            compute_s = record.stages.compute / 1e3
            machine.recompute.observe(len(record.token_ids), rows, compute_s)
        if set(record.loaded_bytes) == {HOST.value}:  # nothing was waited for: all of it decoding
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
    """Places of the chunks that the plan computes, and why."""
    chunks = [span for span in plan.spans if span.chunk_id is not None]
    return {
        place: str(span.reason)
        for place, span in enumerate(chunks)
        if span.kind is SpanKind.COMPUTED
    }


def _tree(engine: Engine, library: Library) -> TreeBehind:
    """The engine's tree as plans for this knowledge base see it."""
    preamble = library.encoder.preamble  # computed here if it never was
    engine.pin_preamble(preamble)
    return TreeBehind(engine.tree, preamble_ref(preamble.token_ids))
