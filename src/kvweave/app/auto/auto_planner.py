"""`reuse="auto"`: the planner, wired to chunk KV behind one preamble, its model and this machine.

    look  →  plan  →  request  →  observe

Plans are made on the thread that asks, from peeks at the knowledge tree and the tiers. A plan is a
wish: by the time the engine admits its request, the tree may hold more or less and bytes may be
gone; the engine takes what is there and computes the rest.
"""

import logging
import threading
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from kvweave.app.audit.audit_log import AuditLog
from kvweave.app.auto.facts import StoredChunkPeek, fusing_strategies, strategy_info
from kvweave.app.auto.growing_gate import GrowingGate
from kvweave.app.auto.lessons import Lessons, TierProbes
from kvweave.app.auto.measurements import Measurements
from kvweave.app.auto.permission import PermittedGate, permitted_strategies
from kvweave.app.auto.requests import Fusion, exact_request, fused_request
from kvweave.app.library.kv_behind import KVBehind
from kvweave.calibrate.profiles import DecoderTables
from kvweave.config import PlannerSettings
from kvweave.corpus.chunker import make_chunk_id
from kvweave.engine.engine import Engine
from kvweave.engine.prefixes import preamble_ref
from kvweave.engine.request import EngineRequest, LoadCost, Ticket
from kvweave.engine.sampling import Sampling
from kvweave.errors import EngineClosed
from kvweave.fuse.encode.contexts import digest_ids
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts, Strategy
from kvweave.kernels.recording import num_first_times
from kvweave.kv.tree import ChunkRef
from kvweave.kv.tree.tree import TreeBehind
from kvweave.plan.cost import CostModel, StrategyInfo
from kvweave.plan.ordering import AccessTable, OrderPermission
from kvweave.plan.other_paths import AlternativePaths
from kvweave.plan.plan import Decision, Gate, Plan, PlanRequest, PredictionCheck, SpanKind
from kvweave.plan.planner import Planner
from kvweave.plan.profile import link_name
from kvweave.plan.recent_requests import PathReturns
from kvweave.reasons import Reason
from kvweave.text.prompt import Prompt
from kvweave.types import ChunkId

log = logging.getLogger(__name__)
MOST_FED_PATHS = 4  # paths that wait for idle time; more are left for the next time they are seen


class PromptPlan(NamedTuple):
    """A plan, and the prompt in the order it wants."""

    request: PlanRequest
    plan: Plan
    prompt: Prompt
    elsewhere: frozenset[ChunkId]  # computed here, though the tree has it behind another path


class Observed(NamedTuple):
    """What became of a plan."""

    decision: Decision
    why: str | None  # nothing is reused after all; None: it is as planned


class AutoPlanner:
    """Plans over chunk KV behind one preamble. Any thread, but for the constructor."""

    def __init__(
        self,
        kv: KVBehind,
        measured: Measurements,
        engine: Engine,
        audited: AuditLog,
        tenant: str = "",
        settings: PlannerSettings | None = None,
    ) -> None:
        """On the engine's thread: plans read its knowledge tree behind the preamble of `kv`, which
        stays there from now on if documents are ingested behind it. Prices are those of `measured`,
        moved by what answers take; the gate is that of calibration and of the documents' own
        evidence, moved by what was `audited`."""
        decoder, doubt = measured.decoder, measured.doubt
        num_layers = decoder.spec.num_layers
        profile = measured.profile if doubt is None else None
        facts = ModelFacts(num_layers) if profile is None else profile.facts(num_layers)
        encoder = kv.encoder
        self._kv = kv
        self._measured = measured
        self._lock = measured.lock  # guards what answers move: prices, and accesses here
        self._facts = facts
        self.machine = measured.machine
        engine.price(self.machine.prefill_s)
        self._shares = bool(engine.cfg.share_chunks)
        self._peek = StoredChunkPeek(encoder, kv.store, lambda keys: engine.resident(keys, tenant))
        preamble = digest_ids(encoder.preamble_ids)
        tables = DecoderTables()
        if profile is not None:
            tables = profile.tables_for(decoder, encoder.encoding_context, preamble)
        growing = GrowingGate(tables, kv.evidence, preamble, audited)
        self._growing = growing
        self._is_permitted = measured.is_permitted
        if not tables.own and doubt is None and not self._is_permitted:
            doubt = Reason.NO_PROFILE
        self._doubt = doubt
        if doubt is not None and not (growing.is_growing or growing.speaks):
            log.warning("%s", doubt)
        self._strategies, unavailable = fusing_strategies(facts)
        gate: Gate = growing
        if self._is_permitted:
            gate, self._strategies = PermittedGate(), permitted_strategies(facts)
        tree, settings = _tree(engine, kv, tenant), settings or PlannerSettings()
        self._paths = AlternativePaths(tree, self._peek.has_copy)
        self._tiers = TierProbes(
            kv.store, decoder.spec.num_layers, encoder.context.codec, self.machine.links
        )
        self._planner = planner = Planner(
            tree,
            CostModel(self.machine),
            self._peek,
            gate=gate,
            accesses=AccessTable(settings.window),
            returns=PathReturns(settings.window),
            tree_uses=settings.tree_uses,
            unavailable=unavailable,
            pending_bytes=kv.store.pending_bytes,
            is_busy=lambda: engine.is_busy,
            is_tree_full=lambda: engine.is_tree_full,
        )
        self._lessons = Lessons(decoder, self.machine, self._tiers, planner)
        self._feeder = PathFeeder(engine)
        self._described: tuple[StrategyInfo, ...] | None = None  # as plans price them

    def plan(self, prompt: Prompt, bound: float, order: OrderPermission) -> PromptPlan:
        """What would be done for a prompt. Computes nothing, but has one chunk loaded from a tier
        whose speed is not known, and waits a moment for that."""
        with self._lock:
            return self._plan(prompt, bound, order)

    def _plan(self, prompt: Prompt, bound: float, order: OrderPermission) -> PromptPlan:
        chunks = _name_chunks(prompt)
        self._peek.look_at({make_chunk_id(ids): ids for ids in prompt.history} | chunks)
        found = self._peek.find_copies().items()
        self._tiers.meet((key, peek) for key, peeks in found for peek in peeks)
        request = PlanRequest(
            tuple(ChunkRef(name, len(ids)) for name, ids in chunks.items()),
            len(prompt.question),
            order,
            quality_bound=bound,
            history=tuple(ChunkRef(make_chunk_id(ids), len(ids)) for ids in prompt.history),
            turns=prompt.turns,
            in_history=tuple(ChunkRef(make_chunk_id(ids), len(ids)) for ids in prompt.left_out),
            strategies=self._describe_strategies(self.machine.stitch_s),
        )
        plan = self._planner.plan(request)
        ordered = tuple(chunks[chunk.id] for chunk in plan.order)
        path = [part.id for part in (*request.history, *plan.order)]
        elsewhere = self._paths.only_elsewhere(path) & chunks.keys()
        return PromptPlan(request, plan, replace(prompt, chunks=ordered), frozenset(elsewhere))

    def request(
        self, planned: PromptPlan, sampling: Sampling, eos_ids: Collection[int]
    ) -> EngineRequest:
        """What the engine is asked for to carry a plan out."""
        plan, strategy = planned.plan, self._strategy(planned.plan)
        if strategy.reuses != "all":  # whatever was found, what is computed may be kept
            exact = exact_request(planned.prompt, sampling, eos_ids, use_tree=True)
            return replace(exact, num_kept=plan.num_kept)
        ratio, expected = plan.chosen.ratio or 0.0, self.estimate_cost(plan)
        # also where tokens are drawn: what was measured counts such answers as exact
        fusion = Fusion(strategy, ratio, _list_computed(plan), expected, plan.close_call)
        fused = fused_request(self._kv, planned.prompt, sampling, eos_ids, fusion)
        return replace(fused, num_kept=plan.num_kept)

    def count_chunks(self, planned: PromptPlan) -> None:
        """Count the chunks of a prompt that was put in order and then computed as its caller
        said."""
        with self._lock:
            self._planner.count_chunks(planned.request)

    def hint(self, planned: PromptPlan) -> str | None:
        """What the caller should know: what to do to have more reused, or that no quality was
        measured. None: nothing."""
        if planned.plan.strategy is not None:
            return Reason.PERMITTED if self._is_permitted else None
        if self._doubt is None or self._growing.speaks:
            return None
        return Reason.CALIBRATING if self._growing.is_growing else self._doubt

    def num_first_times(self) -> int:
        """How often something was done so far that takes longer the first time: see `observe`."""
        return num_first_times()

    def observe(self, planned: PromptPlan, ticket: Ticket, first_times: int) -> Observed:
        """Learn from the prompt of a plan, which is through. `first_times`: how
        many there were before it was submitted."""
        plan, prompt, record, timeline = (
            planned.plan,
            planned.prompt,
            ticket.record,
            ticket.timeline,
        )
        predicted_s = plan.chosen.predicted_s
        assert predicted_s is not None, "what is chosen has a price"
        assert record is not None, "a prompt that is through has a record"
        actual_s = timeline.loading_s + timeline.computing_s
        check = PredictionCheck(plan.chosen.name, predicted_s, actual_s)
        was_close = plan.strategy is not None and record.strategy != plan.strategy
        has_front = not prompt.history
        self._kv.saw(prompt.chunks, planned.elsewhere, prompt.as_of, has_front=has_front)
        with self._lock:
            self._lessons.learn(plan, self._strategy(plan), record, ticket, first_times)
            num_returned = self._planner.num_returned(planned.request, plan)
            self._planner.record_answer(planned.request, plan, was_close=was_close)
        self._measured.keep_lessons()
        if num_returned:
            self._feeder.feed(prompt, num_returned)
        return Observed(Decision(plan, check), Reason.CLOSE_CALL if was_close else None)

    def estimate_cost(self, plan: Plan) -> LoadCost:
        """How long the chosen option loads and computes, by the machine's profile."""
        load_s = 0.0
        for span in plan.spans:
            name = link_name(span.tier, span.codec)
            link = self.machine.link(name) if span.tier else None
            if link is not None and span.kind is SpanKind.FUSED:
                load_s += span.load_bytes / link.bytes_per_s
        total = sum(span.num_tokens for span in plan.spans)
        return LoadCost(load_s, self.machine.recompute.at(total, plan.chosen.rows))

    def _describe_strategies(self, stitch_s: float) -> tuple[StrategyInfo, ...]:
        if self._described is None:
            encoder, shares = self._kv.encoder, self._shares
            self._described = tuple(
                strategy_info(strategy, encoder, shares=shares)
                for strategy in self._strategies.values()
            )
        return tuple(replace(info, score_s_per_token=stitch_s) for info in self._described)

    def _strategy(self, plan: Plan) -> Strategy:
        if plan.strategy is not None:
            return self._strategies[plan.strategy]
        return open_strategy(plan.chosen.name, self._facts)


class PathFeeder:
    """Has paths that come back computed exactly in idle time, so that the next request finds them
    in the knowledge tree. Any thread; nothing here waits. What is under way ends with the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._under_way: dict[tuple[tuple[int, ...], ...], Ticket] = {}

    def feed(self, prompt: Prompt, num_parts: int) -> bool:
        """Have the first so many parts of a prompt computed, history first. False: they are under
        way already, or too many are."""
        history = prompt.history[:num_parts]
        chunks = prompt.chunks[: num_parts - len(history)]
        parts = (prompt.preamble, *history, *chunks)
        # a request needs something to compute: the first token of the question, which is not kept
        begun = replace(prompt, history=history, chunks=chunks, question=prompt.question[:1])
        request = exact_request(begun, Sampling(max_tokens=1), (), use_tree=True)
        with self._lock:
            self._under_way = {k: t for k, t in self._under_way.items() if not t.is_done}
            if parts in self._under_way or len(self._under_way) >= MOST_FED_PATHS:
                return False
            try:
                self._under_way[parts] = self._engine.submit(replace(request, background=True))
            except EngineClosed:
                return False
            return True


def _name_chunks(prompt: Prompt) -> dict[ChunkId, tuple[int, ...]]:
    """Chunks by id, in prompt order. One that is there twice has two names: both stay."""
    named: dict[ChunkId, tuple[int, ...]] = {}
    for place, ids in enumerate(prompt.chunks):
        name = make_chunk_id(ids)
        named[ChunkId(f"{name}@{place}") if name in named else name] = ids
    return named


def _list_computed(plan: Plan) -> dict[int, str]:
    """Places of the parts that the plan computes, history first, and why."""
    parts = [span for span in plan.spans if span.chunk_id is not None]
    return {
        place: str(span.reason)
        for place, span in enumerate(parts)
        if span.kind is SpanKind.COMPUTED
    }


def _tree(engine: Engine, kv: KVBehind, tenant: str) -> TreeBehind:
    """The engine's tree as plans behind this preamble see it. A preamble that some request brought
    is kept like any path; the one of all documents stays."""
    if kv.is_own:
        engine.pin_preamble(kv.encoder.preamble, tenant)  # computed here if it never was
    return TreeBehind(engine.tree, preamble_ref(kv.encoder.preamble_ids, tenant))
