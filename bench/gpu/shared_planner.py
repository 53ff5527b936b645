"""The part `planner` of gpu_shared.py: what the planner chooses against full prefill, prompt by
prompt.

The machine is measured as `kvweave measure` does it. Then prompts of several kinds come mixed, each
alone: its chunks lie on the device, in host memory, partly so, or nowhere; few chunks or many. The
planner plans for what lies where (the gate lets rows through at 15 %), its plan is carried out, and
what it took teaches it, as an answer does; the same prompt is computed by full prefill right before
or after. What planning takes is part of the planner's time.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from common.counting_owner import CountingOwner
from gpu.shared_world import PREAMBLE, QUESTION, SharedWorld
from kvweave.app.auto.facts import strategy_info
from kvweave.app.auto.lessons import Lessons, TierProbes
from kvweave.app.auto.machine_profile import Measurement
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts
from kvweave.kernels.recording import num_first_times
from kvweave.kv.format.codec import dtype_name
from kvweave.kv.format.keys import KeyContext
from kvweave.kv.lookup import Residency
from kvweave.kv.tree import ChunkRef, KnowledgeTree, Pages, TreeConfig
from kvweave.kv.tree.node import DEVICE
from kvweave.plan.cost import CostModel
from kvweave.plan.plan import Plan, PlanRequest, PromptShape, SpanKind, Stored, Verdict
from kvweave.plan.planner import Planner
from kvweave.reasons import Reason
from kvweave.types import ChunkId

RATIO = 0.15
WARM_UP = 3  # prompts of each kind that compile, record and teach before any counts


class Kind(NamedTuple):
    """Where the chunks of a prompt lie."""

    name: str
    on_device: int
    in_host: int
    absent: int


KINDS = (
    Kind("32 on the device", 32, 0, 0),
    Kind("32 in host memory", 0, 32, 0),
    Kind("16 on the device, 16 in host memory", 16, 16, 0),
    Kind("20 on the device, 12 nowhere", 20, 0, 12),
    Kind("8 in host memory, 24 nowhere", 0, 8, 24),
    Kind("32 nowhere", 0, 0, 32),
    Kind("2 on the device", 2, 0, 0),
    Kind("2 in host memory", 0, 2, 0),
    Kind("1 nowhere", 0, 0, 1),
)


class OpenGate:
    """Rows at one ratio are good enough, whatever the prompt."""

    def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict:
        return Verdict(RATIO, Reason.NOT_CALIBRATED)

    def may_reorder(self, bound: float, shape: PromptShape) -> Verdict:
        return Verdict(None, Reason.NOT_CALIBRATED)


class Asked(NamedTuple):
    """One prompt, both ways."""

    kind: str
    choice: str
    planner_ms: float
    full_ms: float

    @property
    def over_full(self) -> float:
        return self.planner_ms / self.full_ms


class PlannedWorld:
    """Prompts of a `SharedWorld` as the planner would have them computed."""

    def __init__(self, world: SharedWorld, engine: Engine) -> None:
        self._world, self._engine = world, engine
        decoder, codec = world.decoder, world.args.codec
        measurement = Measurement(decoder, codec)
        engine.run_alone(measurement.finish)
        self.profile = measurement.profile()
        context = KeyContext("bench", dtype_name(decoder.dtype), codec, "any", (), "any")
        self._encoder = ChunkEncoder(decoder, world.store, context)
        preamble = ChunkRef(ChunkId("preamble"), PREAMBLE)
        tree = KnowledgeTree(
            TreeConfig(1 << 40, 0), CountingOwner(), lambda cached, new: 1.0, preamble,
            Pages(1, None),
        )  # fmt: skip
        costs = CostModel(self.profile)
        self._planner = Planner(tree, costs, self._peek, OpenGate())
        layers = decoder.spec.num_layers
        tiers = TierProbes(world.store, layers, codec, self.profile.links)
        self._lessons = Lessons(decoder, self.profile, tiers, self._planner)
        self._keys: Mapping[ChunkId, Any] = {}
        self._fresh = list(range(len(world.chunks)))  # in host memory alone, so far
        random.Random(5).shuffle(self._fresh)
        self._draw = random.Random(6)
        self._resident: list[int] = []

    def bring(self, count: int) -> None:
        """So many chunks come to the device, 32 by 32."""
        while len(self._resident) < count:
            some = [self._fresh.pop() for _ in range(32)]
            wait_for(self._engine.submit(self._world.request(some, RATIO)))
            self._resident += some

    def ask(self, kind: Kind, *, full_first: bool) -> Asked:
        """One prompt of a kind, both ways."""
        places = [*self._draw.sample(self._resident, kind.on_device)]
        places += [self._fresh.pop() for _ in range(kind.in_host)]
        request = self._request(places, kind.absent)
        full_ms = self._full(request) if full_first else 0.0
        started_s = time.perf_counter()
        planned, plan = self._plan(request)
        recorded = num_first_times()
        carried_out = self._carried_out(request, plan)
        planning_ms = (time.perf_counter() - started_s) * 1e3
        ticket = self._engine.submit(carried_out)
        planner_ms = planning_ms + wait_for(ticket)
        self._learn(planned, plan, ticket, recorded)
        if not full_first:
            full_ms = self._full(request)
        self._resident += [place for place in places if place not in self._resident]
        return Asked(kind.name, plan.chosen.name, planner_ms, full_ms)

    def _request(self, places: Sequence[int], num_absent: int) -> EngineRequest:
        """Over these chunks and others that no store has, in any order."""
        made = self._world.request(places, RATIO, absent=num_absent)
        assert made.fused is not None, "it is fused"
        order = list(range(len(made.chunks)))
        self._draw.shuffle(order)
        chunks = tuple(made.chunks[i] for i in order)
        part = replace(made.fused, chunks=tuple(made.fused.chunks[i] for i in order))
        return replace(made, chunks=chunks, fused=part)

    def _plan(self, request: EngineRequest) -> tuple[PlanRequest, Plan]:
        part = request.fused
        assert part is not None, "it is fused"
        pairs = zip(request.chunks, part.chunks, strict=True)
        self._keys = {chunk.id: named.key for chunk, named in pairs}
        refs = tuple(ChunkRef(chunk.id, len(chunk.token_ids)) for chunk in request.chunks)
        info = strategy_info(part.strategy, self._encoder, self.profile.stitch_s, shares=True)
        asked = PlanRequest(refs, QUESTION, strategies=(info,))
        return asked, self._planner.plan(asked)

    def _peek(self, chunk_ids: Sequence[ChunkId]) -> Mapping[ChunkId, Sequence[Stored]]:
        """As `StoredChunkPeek` says it, of chunks that were computed isolated."""
        keys = [self._keys[chunk_id] for chunk_id in chunk_ids]
        there = self._engine.resident(keys)
        found: dict[ChunkId, list[Stored]] = {}
        size = self._encoder.plain_bytes(self._world.args.chunk_tokens)
        variant, codec = str(self._encoder.preparation.variant), self._world.args.codec
        peeks = self._world.store.peek(keys)
        for chunk_id, key, peek in zip(chunk_ids, keys, peeks, strict=True):
            copies = []
            if key in there:
                copies.append(Stored(variant, DEVICE.value, 0, True, rounded=True))
            if peek.residency is not Residency.ABSENT:
                copies.append(Stored(variant, peek.tier or "", size, True, True, codec=codec))
            if copies:
                found[chunk_id] = copies
        return found

    def _carried_out(self, request: EngineRequest, plan: Plan) -> EngineRequest:
        assert request.fused is not None, "it is fused"
        if plan.strategy is None:
            return replace(request, fused=None)
        parts = [span for span in plan.spans if span.chunk_id is not None]
        computed = {
            place: str(span.reason)
            for place, span in enumerate(parts)
            if span.kind is SpanKind.COMPUTED
        }
        ratio = plan.chosen.ratio or 0.0
        return replace(request, fused=replace(request.fused, ratio=ratio, computed=computed))

    def _full(self, request: EngineRequest) -> float:
        return wait_for(self._engine.submit(replace(request, fused=None, use_tree=False)))

    def _learn(self, planned: PlanRequest, plan: Plan, ticket: Ticket, recorded: int) -> None:
        """As `AutoPlanner` does with the first token of an answer."""
        assert ticket.record is not None, "a prompt that is through has a record"
        facts = ModelFacts(self._world.spec.num_layers)
        exact = open_strategy(plan.chosen.name, facts) if plan.strategy is None else None
        strategy = exact or self._world.weave
        self._lessons.learn(plan, strategy, ticket.record, ticket, recorded)
        self._planner.record_answer(planned, plan)


def measure(
    world: SharedWorld, engine: Engine, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """All kinds in turn, `rounds` times, in an order of each round's own."""
    planned = PlannedWorld(world, engine)
    say("profile measured")
    planned.bring(3 * 32)
    asked: list[Asked] = []
    for number, kind in enumerate(_mixed(WARM_UP + rounds)):
        one = planned.ask(kind, full_first=bool(number % 2))
        if number >= WARM_UP * len(KINDS):
            asked.append(one)
            say(f"  {one.kind}: {one.choice} {one.planner_ms:.1f} ms, full {one.full_ms:.1f} ms")
    rows = [_row(kind.name, [one for one in asked if one.kind == kind.name]) for kind in KINDS]
    return {
        "planner": rows,
        "planner_over_full": max(row["over_full"] for row in rows),  # of the worst kind, median
        "planner_over_full_median": _rounded(one.over_full for one in asked),
        "planner_over_full_worst_prompt": round(max(one.over_full for one in asked), 3),
    }


def _row(kind: str, asked: Sequence[Asked]) -> dict[str, Any]:
    return {
        "kind": kind,
        "prompts": len(asked),
        "choices": {
            c: sum(one.choice == c for one in asked) for c in {one.choice for one in asked}
        },
        "planner_ms": _rounded(one.planner_ms for one in asked),
        "full_ms": _rounded(one.full_ms for one in asked),
        "over_full": _rounded(one.over_full for one in asked),
        "worst": round(max(one.over_full for one in asked), 3),
    }


def _rounded(values: Iterator[float] | Any) -> float:
    return round(statistics.median(values), 3)


def _mixed(rounds: int) -> Iterator[Kind]:
    draw = random.Random(7)
    for _ in range(rounds):
        yield from draw.sample(KINDS, len(KINDS))


def wait_for(ticket: Ticket) -> float:
    """Milliseconds from `submit` to the first token."""
    for _ in ticket:
        pass
    line = ticket.timeline
    assert line.first_token_s is not None, "it was answered"
    return (line.first_token_s - line.submitted_s) * 1e3
