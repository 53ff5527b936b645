"""Prefill a prompt from the store: reuse what is there, recompute what matters, compute the rest.

A chunk whose bytes turn out missing, damaged or late is computed like one that never was there, so
a failing store costs time and never an answer.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kvweave.fuse.fuse import FirstToken, Fused, OrderedFusion, order_fusion
from kvweave.fuse.prepared import Prepared, prepare
from kvweave.fuse.probe import FrontView, begin_probe
from kvweave.fuse.prompt_layers import PromptAttempt, PromptRoom
from kvweave.fuse.protocol import FusionDecoder, Meanwhile, Prefix
from kvweave.fuse.record import (
    ChunkRecord,
    FuseRecord,
    Stages,
    TokenStates,
    chunk_records,
    exact_chunk_records,
)
from kvweave.fuse.request import FuseRequest, PromptChunk, classify
from kvweave.fuse.sources import ChunkLost
from kvweave.fuse.stitched import Stitched
from kvweave.fuse.strategy import Strategy
from kvweave.kv.format.codec import is_lossless
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.store import KVStore
from kvweave.kv.transfers import Lease, Transfer
from kvweave.reasons import Reason

M = TypeVar("M", OrderedFusion, Prepared)
NEVER = ChunkKey(b"")  # the key of a chunk that a strategy does not want from the store
DEVICE = "device"  # the tier of chunks that lie in pages already
LINK_BYTES_PER_S = 50e9  # to a device, or from memory to memory: what a load takes at least


class PromptFrame(NamedTuple):
    """What stands around the stored chunks. `exact` is the KV of the preamble and, behind it, of
    the first `num_exact` chunks at their places; the others come from the store or are computed."""

    exact: Prefix
    question_ids: Sequence[int]
    num_exact: int = 0
    asked: tuple[int, int] | None = None  # the part of the question that the user wrote
    encoding: str = ""


class Prefilled(NamedTuple):
    """A prefilled prompt, and how it came about."""

    logits: Tensor  # [V] of the last token
    first: FirstToken | None  # as of Fused
    record: FuseRecord

    @property
    def lead(self) -> float:
        """How far the likeliest token's logit is ahead of the next one's; waits for it."""
        if self.first is not None:
            return self.first.lead
        first, second = self.logits.topk(2).values.tolist()
        return float(first - second)


class OrderedPrefill(NamedTuple):
    """A prefill that a device is at."""

    ordered: OrderedFusion
    record_of: Callable[[Fused], FuseRecord]
    room: PromptRoom
    rounded: set[ChunkKey]  # of its chunks, those that a codec rounded

    @property
    def is_through(self) -> bool:
        return self.ordered.is_through

    def finish(self) -> Prefilled:
        """Wait for the pass and return the prefilled prompt."""
        made = self.ordered.finish()
        record = self.record_of(made)
        self.room.note_pass_finished(_load_s(record), self.rounded)
        return Prefilled(made.logits, made.first, record)


class RecordParts(NamedTuple):
    """What a record says of chunks and tokens: known as soon as the pass is ordered."""

    states: TokenStates
    chunks: tuple[ChunkRecord, ...]
    loaded_bytes: dict[str, int]


Tell = Callable[[Sequence[int]], None]  # hears which hits are recomputed, when that is known
Attempt = Callable[[FuseRequest, Tell], M]


class StoredPrompt:
    """The chunk KV of one prompt, leased and on its way. Close it, or use it as a context manager.

        with StoredPrompt(num_layers, chunks, store, strategy) as stored:
            prefilled = stored.prefill(decoder, PromptFrame(preamble, question), OwnRoom(kv), ratio)

    Made and waited for on any one thread, then handed to the thread of the pass: never two at once.
    """

    def __init__(
        self,
        num_layers: int,
        chunks: Sequence[PromptChunk],
        store: KVStore,
        strategy: Strategy,
        computed: Mapping[int, str] | None = None,
        resident: Collection[ChunkKey] = (),
    ) -> None:
        """Takes the lease and starts loading. May wait for a tier to say what it has.

        `computed` are places of chunks that are computed even if they are stored, each with the
        reason that the record gives: a slow tier can cost more than it saves. `resident` lie in
        shared pages already: the store is not asked for them.
        """
        started_s = time.perf_counter()
        self._num_layers = num_layers
        self._chunks = chunks
        self._strategy = strategy
        self._computed = computed or {}
        self._named = named_kv(chunks, store, strategy, self._computed)
        self._wanted = [key for key, _ in self._named if key is not None]
        self.resident = frozenset(resident).intersection(self._wanted)
        self.resident_rounded = frozenset[ChunkKey]()  # of these, what a codec rounded; see `found`
        needs = strategy.needs(num_layers)
        self._lease = store.acquire([key for key in self._wanted if key not in self.resident])
        first = sorted({*needs.key_layers, *needs.value_layers} - {0})
        self._transfer = store.load(self._lease, first, needs.extras)
        self._started_s = started_s
        self._waited_s = time.perf_counter() - started_s  # for bytes, outside the pass

    def note_resident(self, resident: Collection[ChunkKey], rounded: Collection[ChunkKey]) -> None:
        """Note that these chunks lie in shared pages by now, whatever the store has of them; those
        that are `rounded` came from a codec that loses bits."""
        self.resident |= frozenset(resident).intersection(self._wanted)
        self.resident_rounded = frozenset(rounded)

    def arrive(self) -> None:
        """Wait until all that the strategy wants is in host memory, or lost."""
        started_s = time.perf_counter()
        self._transfer.wait_extras()
        for layer in range(self._num_layers):
            self._transfer.wait_layer(layer)
        self._waited_s += time.perf_counter() - started_s

    def arrive_on_all_ranks(self, decoder: FusionDecoder) -> None:
        """Wait for the same on every rank of a decoder, and lose here what any of them has lost:
        they make one pass together, over the same rows."""
        self.arrive()
        missing = _missing(self._num_layers, self._lease, self._transfer)
        is_lost = torch.tensor([float(key in missing) for key in self._wanted])
        lost_by = decoder.sum_over_ranks(is_lost).tolist()
        for key, num_ranks in zip(self._wanted, lost_by, strict=True):
            if num_ranks and key not in missing:
                self._transfer.lost[key] = Reason.ABSENT

    def close(self) -> None:
        """Give the lease back. Harmless the second time."""
        self._lease.release()

    def __enter__(self) -> "StoredPrompt":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_arrived(self) -> bool:
        """Whether nothing would be waited for any more. Asks for nothing."""
        layers = range(self._num_layers)
        return self._transfer.has_extras() and all(map(self._transfer.is_ready, layers))

    def prefill(
        self, decoder: FusionDecoder, frame: PromptFrame, room: PromptRoom, ratio: float
    ) -> Prefilled:
        """Prefill the prompt into `room`, as the strategy says."""
        return self.order(decoder, frame, room, ratio).finish()

    def order(
        self,
        decoder: FusionDecoder,
        frame: PromptFrame,
        room: PromptRoom,
        ratio: float,
        meanwhile: Meanwhile | None = None,
    ) -> "OrderedPrefill":
        """Compute all rows that the strategy does not reuse, in one pass, up to where the host
        would wait for a device. The KV lies in `room` afterwards."""
        self._probe_ahead(decoder, frame, ratio)

        def attempt(request: FuseRequest, tell: Tell) -> OrderedFusion:
            def on_ordered(recomputed: Sequence[int]) -> None:
                room.note_pass_ordered()
                tell(recomputed)

            with self._stitch(decoder, frame, room, request) as stitched:
                return order_fusion(stitched, self._strategy, ratio, on_ordered, meanwhile)

        ordered, record_of = self._weave(frame, ratio, attempt)
        return OrderedPrefill(ordered, record_of, room, self.rounded_keys())

    def prepare(
        self, decoder: FusionDecoder, frame: PromptFrame, room: PromptRoom, ratio: float
    ) -> tuple[Prepared, FuseRecord]:
        """Choose the rows and lay what they will look at: they are computed in slices, in ordinary
        forward passes, so the record has no compute time yet.

        For strategies that can be sliced. Afterwards the store is not needed any more.
        """
        name = self._strategy.name
        assert self._strategy.can_be_sliced, f"strategy {name!r} has no rows before its pass"

        def attempt(request: FuseRequest, _: Tell) -> Prepared:
            with self._stitch(decoder, frame, room, request) as stitched:
                prepared = prepare(stitched, self._strategy, ratio)
            room.note_pass_ordered()
            return prepared

        made, record_of = self._weave(frame, ratio, attempt)
        return made, record_of(made)

    def _probe_ahead(self, decoder: FusionDecoder, frame: PromptFrame, ratio: float) -> None:
        """Order the selector's probe before anything else is looked at, where that can be done: the
        choice of rows waits for nothing else."""
        needs = self._strategy.needs(self._num_layers)
        if needs.probes_ahead and 0 < ratio < 1:
            num_chunk_tokens = sum(len(ids) for _, ids in self._named[frame.num_exact :])
            start = len(frame.exact.token_ids) + num_chunk_tokens
            view = FrontView(frame.exact.layers if needs.probe == "preamble" else ())
            begin_probe(decoder, frame.question_ids, start, view, needs.key_layers)

    @contextmanager
    def _stitch(
        self, decoder: FusionDecoder, frame: PromptFrame, room: PromptRoom, request: FuseRequest
    ) -> Iterator[Stitched]:
        needs = self._strategy.needs(self._num_layers)
        attempt = PromptAttempt(decoder, request, frame.exact, self._transfer, needs)
        with room.open(attempt) as layers:
            yield Stitched(decoder, request, frame.exact, layers)

    def _weave(
        self,
        frame: PromptFrame,
        ratio: float,
        attempt: Attempt[M],
    ) -> tuple[M, Callable[[Fused | Prepared], FuseRecord]]:
        """Attempt the pass, again without the chunks that were lost on the way until none was.
        Returns the result and what makes the record once the pass is finished."""
        started_s = time.perf_counter()
        lease, transfer = self._lease, self._transfer
        named = self._named[frame.num_exact :]
        missing = _missing(self._num_layers, lease, transfer)
        missing = {key: why for key, why in missing.items() if key not in self.resident}
        while True:
            first_is_exact = bool(named) and not frame.num_exact
            first_is_exact = first_is_exact and named[0][0] == self._chunks[0].exact_key
            request = classify(
                frame.exact.token_ids,
                [(key or NEVER, ids) for key, ids in named],
                frame.question_ids,
                present=set(self._wanted) - missing.keys(),
                first_is_exact=first_is_exact,
                asked=frame.asked,
            )
            tried_s = time.perf_counter()  # until here: waiting for headers, and for what was lost
            told: list[RecordParts] = []
            tell = partial(self._tell, told, frame, request, missing)
            try:
                made = attempt(request, tell)
            except ChunkLost as lost:  # computed instead; each turn has fewer chunks to lose
                missing |= {key: self._why_lost(key) for key in lost.keys}
                continue
            waited_s = self._waited_s + tried_s - started_s
            if not told:
                tell(made.recomputed)
            return made, partial(self._record, frame, ratio, request, told[0], waited_s)

    def _why_lost(self, key: ChunkKey) -> Reason:
        """Why a chunk that arrived, or did not, cannot be reused. One of the wrong shape is not
        lost to the transfer, only to us."""
        wanted = self._strategy.needs(self._num_layers).extras
        header = self._transfer.headers().get(key)
        if header is not None and not header.extras.keys() >= set(wanted):
            return Reason.NEEDS_MISSING
        return self._transfer.lost.get(key, Reason.CORRUPT)

    def _tell(
        self,
        told: list[RecordParts],
        frame: PromptFrame,
        request: FuseRequest,
        missing: Mapping[ChunkKey, Reason],
        recomputed: Sequence[int],
    ) -> None:
        """Add what is known of a pass that is ordered to `told`."""
        num_exact = frame.num_exact
        reused = request.as_reused(self.rounded_keys())
        lengths = [len(ids) for _, ids in self._named[:num_exact]]
        front = exact_chunk_records(lengths, len(frame.exact.token_ids))
        why = {i - num_exact: words for i, words in self._computed.items() if i >= num_exact}
        tiers = {**self._lease.tiers, **dict.fromkeys(self.resident, DEVICE)}
        behind = chunk_records(reused, recomputed, tiers, missing, why)
        states = TokenStates(reused, recomputed)
        told.append(RecordParts(states, (*front, *behind), self._loaded_bytes(request)))

    def _record(
        self,
        frame: PromptFrame,
        ratio: float,
        request: FuseRequest,
        parts: RecordParts,
        waited_s: float,
        made: Fused | Prepared,
    ) -> FuseRecord:
        return FuseRecord(
            strategy=self._strategy.name,
            ratio=ratio,
            encoding=frame.encoding,
            token_ids=request.prompt_ids,
            states=parts.states,
            chunks=parts.chunks,
            work=made.work,
            loaded_bytes=parts.loaded_bytes,
            stages=Stages(
                load=(made.load_s + waited_s) * 1e3,
                select=made.select_s * 1e3,
                compute=made.pass_s * 1e3,
            ),
            arrived_s=self._transfer.seconds(),
            loading_since_s=self._started_s,
            trace=made.trace,
        )

    def rounded_keys(self) -> set[ChunkKey]:
        """Return chunks that the store gives back other than they were computed. Blocks for
        headers."""
        headers = self._transfer.headers().items()
        loaded = {key for key, of in headers if not is_lossless(of.codec, of.shape.dtype)}
        return loaded | self.resident_rounded

    def _loaded_bytes(self, request: FuseRequest) -> dict[str, int]:
        """Return the bytes that travelled, by tier. What lay on the device already did not
        travel."""
        sizes = self._transfer.sizes()
        loaded: Counter[str] = Counter()
        for key in {span.key for span in request.placed} - self.resident:
            loaded[self._lease.tiers[key]] += sizes.get(key, 0)
        return dict(loaded)


def scores_rows(strategy: Strategy, ratio: float, num_layers: int) -> bool:
    """Whether the question is probed before the pass, to score the rows that are recomputed."""
    return strategy.needs(num_layers).probe != "none" and 0 < ratio < 1


def can_share(strategy: Strategy, num_layers: int) -> bool:
    """Whether a strategy can leave chunks in pages that others read too: it knows its rows before
    the pass, and takes nothing from the store but layers."""
    needs = strategy.needs(num_layers)
    return strategy.can_be_sliced and strategy.reuses == "all" and not needs.extras


def _load_s(record: FuseRecord) -> float:
    """Return what bringing the chunks of a prompt cost: the time it waited for them, and at least
    what their bytes take over the link."""
    travelled = sum(record.loaded_bytes.values()) / LINK_BYTES_PER_S
    return max(record.stages.load / 1e3, travelled)


def named_kv(
    chunks: Sequence[PromptChunk],
    store: KVStore,
    strategy: Strategy,
    computed: Mapping[int, str],
) -> list[tuple[ChunkKey | None, tuple[int, ...]]]:
    """Which stored KV each chunk takes; None computes it.

    The first chunk takes its isolated KV: there, and only there, it is exact. Where the store has
    none (it is made once a chunk has stood in front), the chunk is computed, which is exact too.
    """
    named: list[tuple[ChunkKey | None, tuple[int, ...]]] = []
    for i, chunk in enumerate(chunks):
        key: ChunkKey | None = chunk.key
        if i in computed:
            named.append((None, chunk.token_ids))
            continue
        if i == 0:
            key = chunk.exact_key  # asked for also where it is absent: the miss is on record
        if strategy.reuses == "none" or (
            strategy.reuses == "exact" and not (i == 0 and key == chunk.exact_key)
        ):
            key = None
        named.append((key, chunk.token_ids))
    return named


def _missing(num_layers: int, lease: Lease, transfer: Transfer) -> dict[ChunkKey, Reason]:
    for key, header in transfer.headers().items():
        if len(header.layers) != num_layers:
            transfer.lost[key] = Reason.CORRUPT  # not of this model, whatever its key says
    return {**lease.missing, **transfer.lost}
