"""`reuse="auto"`: the planner, wired to one knowledge base, its model and this machine.

    look  →  plan  →  carry out  →  observe

The knowledge tree holds the preamble and nothing else until an engine with pages brings its own.
Part of the composition root: only `app.py` uses it. Used by whoever has the turn at the decoder,
one thread at a time.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

from kvweave.answering import Note
from kvweave.corpus.chunker import make_chunk_id
from kvweave.engine.sampling import Choice, Sampling
from kvweave.fuse.contexts import digest_ids
from kvweave.fuse.profiles import Profile
from kvweave.fuse.record import FuseRecord
from kvweave.fuse.strategy import ModelFacts, Strategy, open_strategy
from kvweave.kv.tree import ChunkRef, KnowledgeTree, PageOwner, Pages, TreeConfig, TreeTier
from kvweave.kv.tree.node import HOST
from kvweave.library import Library
from kvweave.machine import Say, open_machine, profile_path, save, say_on_stderr, wait_for
from kvweave.model.decoder import Decoder
from kvweave.plan.altpath import AlternativePaths
from kvweave.plan.cost import CostModel
from kvweave.plan.ordering import OrderPermission
from kvweave.plan.plan import Decision, Judged, Plan, PlanRequest, SpanKind
from kvweave.plan.planner import Planner
from kvweave.plan.profile import GAIN, MachineProfile
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

PREAMBLE = ChunkId("preamble")


class Planned(NamedTuple):
    """A plan, and the prompt in the order it wants."""

    request: PlanRequest
    plan: Plan
    prompt: Prompt
    elsewhere: frozenset[ChunkId]  # computed here, though the tree has it behind another path


class Planning:
    """Plans and answers over one knowledge base. Opening it may measure the machine: seconds."""

    def __init__(
        self,
        library: Library,
        decoder: Decoder,
        facts: ModelFacts,
        profile: Profile | None,
        *,
        say: Say = say_on_stderr,
        tree: KnowledgeTree | None = None,
        queue_s: Callable[[], float] = lambda: 0.0,
        seen: SeenChunks | None = None,
    ) -> None:
        """`tree` is the engine's, behind the library's preamble; None makes one that holds the
        preamble alone. `queue_s` says how much compute is promised to requests ahead. `seen` hears
        which chunks came. `say` hears a line when something takes a while."""
        encoder = library.encoder
        self._library = library
        self._decoder = decoder
        self._facts = facts
        self._path = profile_path(decoder)
        self.machine = open_machine(decoder, encoder.context.codec, say)
        self._peek = StoredChunkPeek(encoder, library.store)
        table = None
        if profile is not None:
            preamble = digest_ids(encoder.preamble_ids)
            table = profile.table(decoder.revision, encoder.encoding_context, preamble)
        self._strategies, unavailable = fusing_strategies(facts)
        self._seen = seen
        tree = tree or _preamble_tree(library, self.machine)
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
            queue_s=queue_s,
            pending_bytes=library.store.pending_bytes,
        )

    def close(self) -> None:
        """Keep what was learnt of the machine."""
        save(self.machine, self._path)

    def plan(self, prompt: Prompt, bound: float, order: OrderPermission) -> Planned:
        """What would be done for a prompt. Computes nothing, but has one chunk loaded from a tier
        whose speed is not known, and waits a moment for that."""
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

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        eos_ids: Collection[int],
        bound: float,
        order: OrderPermission,
        note: Note,
    ) -> Iterator[Choice]:
        """Answer by the cheapest plan. `note` hears what was done before the first choice."""
        planned = self.plan(prompt, bound, order)
        plan = planned.plan
        strategy = self._strategy(plan)
        started_s = time.perf_counter()

        def on_record(record: FuseRecord) -> None:
            wait_for(self._decoder)
            actual_s = time.perf_counter() - started_s
            predicted_s = plan.chosen.predicted_s
            assert predicted_s is not None, "what is chosen has a price"
            note.decision = Decision(plan, Judged(plan.chosen.name, predicted_s, actual_s))
            note.keep(record)
            note.laid(planned.prompt)
            self._observe(strategy, record, actual_s)
            self._planner.finished(planned.request, plan)

        try:
            yield from self._library.generate(
                planned.prompt,
                sampling,
                eos_ids,
                strategy,
                plan.chosen.ratio or 0.0,
                on_record,
                computed=_computed(plan),
            )
        finally:
            if self._seen is not None:
                self._seen.saw(planned.prompt.chunks, planned.elsewhere)

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
    """Places of the chunks that the plan computes, and why. The history is not among them."""
    chunks = [span for span in plan.spans if span.chunk_id is not None and not span.in_history]
    return {
        place: str(span.reason)
        for place, span in enumerate(chunks)
        if span.kind is SpanKind.COMPUTED
    }


class _NoPages:
    """Owns nothing: the preamble's KV lives with the encoder, and there are no other nodes."""

    def copy_out(self, pages: Pages) -> Pages | None:
        return None

    def copy_in(self, pages: Pages) -> Pages | None:
        return None

    def free(self, tier: TreeTier, pages: Pages) -> None:
        """The encoder keeps it."""


def _preamble_tree(library: Library, machine: MachineProfile) -> KnowledgeTree:
    preamble = library.encoder.preamble  # computed here if it never was
    size_bytes = sum(kv.k.nbytes + kv.v.nbytes for kv in preamble.layers)
    owner: PageOwner = _NoPages()
    cost_s: Callable[[int, int], float] = machine.prefill.at
    reference = ChunkRef(PREAMBLE, len(preamble.token_ids))
    tree = KnowledgeTree(TreeConfig(max(1, size_bytes), 0), owner, cost_s, reference)
    tree.install_preamble(Pages(size_bytes, None))
    return tree
