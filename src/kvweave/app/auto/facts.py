"""What the planner is told about one model and its chunk KV, as plain data.

Strategies by what their selectors need, the gate by what calibration measured, and where chunk KV
lies by what the store says.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kvweave.calibrate.gate import (
    ELSEWHERE,
    FEWEST_QUESTIONS,
    LENGTH_MATTERS,
    ORDER_CELL,
    Cell,
    Table,
    deciding_tables,
    is_within,
    tables_for_size,
)
from kvweave.errors import ConfigError
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.contexts import ISOLATED
from kvweave.fuse.encode.extras import INTER, anchors_of
from kvweave.fuse.needs import Needs
from kvweave.fuse.prefill import can_share
from kvweave.fuse.selectors.strategies import NAMES, open_strategy
from kvweave.fuse.strategy import ModelFacts, Strategy
from kvweave.kv.format.codec import is_lossless, open_codec
from kvweave.kv.format.header import LayerShape
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.lookup import Peek, Residency
from kvweave.kv.store import KVStore
from kvweave.kv.tree.node import DEVICE
from kvweave.plan.cost import StrategyInfo
from kvweave.plan.plan import PromptShape, Stored, Verdict
from kvweave.reasons import Reason
from kvweave.types import ChunkId

ON_DEVICE = Peek(Residency.HERE, DEVICE.value, 0)
MOST_VERDICTS = 1024  # of a gate that are remembered


def layer_bytes_per_token(encoder: ChunkEncoder) -> float:
    """What one layer of one token takes in the store, without headers."""
    spec, context = encoder.decoder.spec, encoder.context
    shape = LayerShape(256, spec.num_kv_heads, spec.head_dim, context.dtype)
    return open_codec(context.codec).num_bytes(shape) / shape.num_tokens


def fusing_strategies(facts: ModelFacts) -> tuple[dict[str, Strategy], dict[str, Reason]]:
    """Every strategy that can run on this model and reuses what is not exact; why not others."""
    found: dict[str, Strategy] = {}
    unavailable: dict[str, Reason] = {}
    for name in NAMES:
        try:
            strategy = open_strategy(name, facts)
        except ConfigError:  # it wants the critical layers, which were never looked for
            unavailable[name] = Reason.NO_LAYERS
            continue
        if strategy.reuses == "all":
            found[name] = strategy
    return found, unavailable


def strategy_info(
    strategy: Strategy, encoder: ChunkEncoder, stitch_s: float = 0.0, *, shares: bool = False
) -> StrategyInfo:
    """A strategy as the planner prices it. `stitch_s` is what each stored token costs to lay.
    `shares`: the engine keeps chunks on the device, for those that can read them there."""
    num_layers = encoder.decoder.spec.num_layers
    needs = strategy.needs(num_layers)
    layers = _layers_first(needs)
    layer_bytes = layer_bytes_per_token(encoder)
    extra_bytes = _extra_bytes(needs, encoder)
    return StrategyInfo(
        strategy.name,
        variants=(str(encoder.preparation.variant),),
        needs=frozenset(needs.extras),
        selection_bytes_per_token=len(layers) * layer_bytes + extra_bytes,
        extra_bytes_per_token=extra_bytes,
        # scoring a layer reads the stored keys once more, about what a probe pays for a layer
        probe_layers=needs.probe_depth + (len(needs.key_layers) if needs.probe != "none" else 0),
        score_s_per_token=stitch_s,
        full_width_layers=needs.full_width_layers,
        waits_for_all=len(layers) >= num_layers,
        depth=strategy.depth(num_layers),
        shares=shares and can_share(strategy, num_layers),
    )


def _layers_first(needs: Needs) -> set[int]:
    """Stored layers that must be there before the pass begins."""
    if needs.full_width_layers:
        return set()  # chosen inside the pass, from layers as they come
    layers = {*needs.key_layers, *needs.value_layers}
    return layers | set(range(needs.probe_depth)) if needs.probe == "full" else layers


def _extra_bytes(needs: Needs, encoder: ChunkEncoder) -> float:
    """What is read beside the layers, per token: float16 keys and values of a share of the tokens
    for each kind of anchors, one float16 for inter-attention."""
    spec = encoder.decoder.spec
    shares = sum(anchors_of(name)[1] for name in needs.extras if name != INTER)
    anchors = shares * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * 2
    return anchors + 2 * needs.extras.count(INTER)


_ShapeClass = tuple[bool, int, int]  # shapes that the same tables decide


class CalibratedGate:
    """Lets a strategy through at the smallest ratio that every kind of questions bears: each kind
    was measured, and the worst decides.

    The user's own questions, where there are enough, decide alone on prompts like theirs, and have
    a say on others (`gate.deciding_tables`). A kind
    that was measured at several numbers of chunks speaks by the smallest that covers the prompt and
    those below it (`gate.tables_for_size`); of a history chunks that might be fused count, words do
    not, and tables that have a history speak besides. What was measured behind
    another system prompt, or without a history where no table has one, is held to half the bound.
    Long prompts, longer than all that were measured, do not pass. Tables of few questions count
    with wider intervals, and those of very few not at all. Pure: any thread.
    """

    def __init__(self, tables: Sequence[Table], preamble: str) -> None:
        """`tables` are of this very decoder and encoding context (`Profile.tables`); `preamble` is
        the digest of what stands in front of all chunks."""
        usable = [t for t in tables if t.num_questions >= FEWEST_QUESTIONS]
        self._preamble = preamble
        self._tables = usable
        # own questions rarely have a history: those that come with the model speak for it then
        self._with_history = [t for t in usable if t.has_history]
        self._cells = {id(table): table.widen_intervals() for table in usable}
        self._sizes = sorted({table.num_chunks for table in usable})
        self._lengths = sorted({table.longest_covered for table in usable})
        # by history, size and length: those that decide, and the longest prompt they speak for
        self._deciding: dict[_ShapeClass, tuple[tuple[Table, ...], float]] = {}
        self._verdicts: dict[tuple[str, float, _ShapeClass, bool], Verdict] = {}

    def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict:
        """Remembers what it found: it is asked for every strategy of every request."""
        size = bisect_left(self._sizes, shape.num_chunks)
        length = bisect_left(self._lengths, counted_tokens(shape))
        alike = shape.has_history, size, length
        found = self._deciding.get(alike)
        if found is None:
            tables = self._find_deciding(shape)
            found = self._deciding[alike] = tables, _longest_allowed(tables)
        tables, longest = found
        is_beyond = shape.num_tokens > longest
        key = (strategy, bound, alike, is_beyond)
        verdict = self._verdicts.get(key)
        if verdict is None:
            if len(self._verdicts) >= MOST_VERDICTS:  # bounds come from requests
                self._verdicts.clear()
            judged = self._judge(strategy, bound, tables, shape.has_history, is_beyond)
            verdict = self._verdicts[key] = judged
        return verdict

    def _judge(
        self,
        strategy: str,
        bound: float,
        tables: Sequence[Table],
        has_history: bool,
        is_beyond: bool,
    ) -> Verdict:
        measured = [self._of(table, strategy) for table in tables]
        if not measured or not all(measured):
            return Verdict(None, Reason.NOT_CALIBRATED)
        if is_beyond:
            return Verdict(None, Reason.BEYOND_MEASURED)
        shares = [self._share(table, has_history) for table in tables]
        passing = [
            {ratio for ratio, cell in cells.items() if is_within(cell, share * bound)}
            for cells, share in zip(measured, shares, strict=True)
        ]
        why = Reason.HALF_BOUND_NOT_MET if min(shares) < 1.0 else Reason.BOUND_NOT_MET
        ratio = min(set.intersection(*passing), default=None)
        if ratio is None:
            return Verdict(None, why)
        chosen = [cells[ratio] for cells in measured]
        close = sum(cell.close for cell in chosen) / len(chosen)
        worst = max(range(len(tables)), key=lambda i: chosen[i].kl_high / shares[i])
        return Verdict(
            ratio,
            why,
            close=close,
            close_call=_widest_lead(tables, chosen),
            evidence=tables[worst].words,
        )

    def may_reorder(self, bound: float, shape: PromptShape) -> Verdict:
        """Whether chunks may stand in another order than they were found in: ratio 0 if the order
        was measured to cost no more than the bound, else None and why."""
        return self.min_ratio(ORDER_CELL, bound, shape)

    def _find_deciding(self, shape: PromptShape) -> tuple[Table, ...]:
        size = shape.num_chunks, counted_tokens(shape)
        deciding = deciding_tables(self._tables, *size)
        alone = [t for t in deciding if not t.has_history] or deciding
        sized = tables_for_size(alone, *size)
        if not shape.has_history:
            return sized
        if not self._with_history:
            return deciding
        with_history = deciding_tables(self._with_history, *size)
        both = {id(table): table for table in (*sized, *with_history)}
        return tuple(both.values())

    def _of(self, table: Table, strategy: str) -> dict[float, Cell]:
        return {cell.ratio: cell for cell in self._cells[id(table)] if cell.strategy == strategy}

    def _share(self, table: Table, has_history: bool) -> float:
        """The part of the bound that a table is held to."""
        share = 1.0 if table.preamble == self._preamble else ELSEWHERE
        covered = table.has_history or not has_history
        return share if covered or self._with_history else share * ELSEWHERE


def _widest_lead(tables: Sequence[Table], chosen: Sequence[Cell]) -> float:
    """The lead of a first token that counts as a close call: what is served must be what was
    measured."""
    return max(
        table.close_call if cell.close_call is None else cell.close_call
        for table, cell in zip(tables, chosen, strict=True)
    )


def counted_tokens(shape: PromptShape) -> int:
    """Tokens by which the size of a prompt is judged. Nothing of what was said is fused: it counts
    only where the length of a prompt was measured to matter."""
    is_long = shape.num_tokens > LENGTH_MATTERS
    return shape.num_tokens if is_long else shape.num_tokens - shape.num_said_tokens


def _longest_allowed(tables: Sequence[Table]) -> float:
    """Tokens of a prompt beyond which the gate stays shut."""
    longest = [table.most_prompt_tokens for table in tables]
    return max(LENGTH_MATTERS, *longest) if longest and all(longest) else math.inf


class _Names(NamedTuple):
    """The two names under which a chunk may be stored; without neighbours they are one."""

    own: ChunkKey  # behind its encoding context
    isolated: ChunkKey

    def each(self) -> tuple[ChunkKey, ...]:
        return (self.own,) if self.own == self.isolated else self


class StoredChunkPeek:
    """Says what the store has of the chunks of a prompt: behind their context, and isolated.

    Isolated KV right behind the preamble is what full prefill computes there, but for the codec's
    rounding. That is small (int8: 3e-5 nats per token on SmolLM2) and was never measured on the
    user's model, so a rounded copy is offered to fusion alone, whose bound the user has set, and an
    answer that is called exact is equal to full prefill. For one thread at a time.
    """

    def __init__(
        self,
        encoder: ChunkEncoder,
        store: KVStore,
        resident: Callable[[Collection[ChunkKey]], Collection[ChunkKey]] = lambda _: (),
    ) -> None:
        """`resident` says which chunks lie on the device, for those who ask here."""
        self._encoder = encoder
        self._store = store
        self._resident = resident
        self._chunks: Mapping[ChunkId, tuple[int, ...]] = {}
        self._named: dict[ChunkId, _Names] = {}
        self._found: dict[ChunkKey, list[Peek]] | None = None
        context = encoder.context
        self._rounded = not is_lossless(context.codec, context.dtype)
        self._sizes: dict[int, int] = {}  # by tokens, see `ChunkEncoder.plain_bytes`

    def look_at(self, chunks: Mapping[ChunkId, tuple[int, ...]]) -> None:
        """The token ids behind the names that will be asked for. The store is looked at once for
        all of them: a tier may have to be asked, which takes a moment each time."""
        self._chunks = chunks
        own, isolated = self._encoder.key, self._encoder.exact_key
        self._named = {name: _Names(own(ids), isolated(ids)) for name, ids in chunks.items()}
        self._found = None

    def find_copies(self) -> Mapping[ChunkKey, Sequence[Peek]]:
        """All stored KV of the chunks, wherever it lies: on the device first."""
        if self._found is None:
            keys = [key for names in self._named.values() for key in names.each()]
            there = self._resident(keys)
            self._found = {key: [ON_DEVICE] for key in keys if key in there}
            for key, peek in zip(keys, self._store.peek(keys), strict=True):
                if peek.residency is not Residency.ABSENT:
                    self._found.setdefault(key, []).append(peek)
        return self._found

    def has_copy(self, chunk_id: ChunkId) -> bool:
        """Whether some tier has KV of a chunk of this prompt, in whatever encoding context."""
        found = self.find_copies()
        names = self._named.get(chunk_id)
        return names is not None and any(key in found for key in names.each())

    def __call__(self, chunk_ids: Sequence[ChunkId]) -> Mapping[ChunkId, Sequence[Stored]]:
        stored: dict[ChunkId, list[Stored]] = {}
        found = self.find_copies()
        for chunk_id in chunk_ids:
            names, num_tokens = self._named[chunk_id], len(self._chunks[chunk_id])
            for key in names.each():
                for peek in found.get(key, ()):
                    copy = self._describe_copy(names, key, peek, num_tokens)
                    stored.setdefault(chunk_id, []).append(copy)
        return stored

    def _describe_copy(self, names: "_Names", key: ChunkKey, peek: Peek, num_tokens: int) -> Stored:
        preparation = self._encoder.preparation
        isolated = key == names.isolated
        # not what the store says: that counts what lies beside the layers, wanted or not
        size_bytes = self._sizes.get(num_tokens) or self._encoder.plain_bytes(num_tokens)
        self._sizes[num_tokens] = size_bytes
        on_device = peek.tier == DEVICE  # layers alone, and they are where they are needed
        return Stored(
            variant=str(preparation.variant) if key == names.own else ISOLATED,
            tier=peek.tier or "",
            size_bytes=0 if on_device else size_bytes,
            exact_when_first=isolated,
            rounded=isolated and self._rounded,
            has=peek.extras,
            codec="" if on_device else self._encoder.context.codec,
            never_first=not isolated,
        )
