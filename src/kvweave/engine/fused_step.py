"""How a fused prompt gets its bytes and is computed.

Loading overlaps computing (FusionRAG, 7.3 of the algorithms reference):

    request by request   all bytes first, while other requests run; then it is computed
    layer by layer       the pass starts at once and waits for each layer as it gets there

The first leaves the device to requests that can use it, and its rows can run beside theirs; the
second is faster for a request that is alone. `waits_outside` and `prefill_mode_of` are the rules
between them.

A fused request takes a step of its own, into pages that belong to it alone. Streamed or whole, that
is its prefill; joined, it is stitching and choosing the rows that the common steps then compute.
Its rows are approximate from the first reused chunk on, and nothing of that is ever offered to the
tree; chunks in front that are computed behind exact ones are (`EngineSequence.num_exact_parts`).

Where chunks are shared (`chunk_pages.py`) its pages hold what it computes, and the chunks lie where
all requests read them. What it recomputes of them is then computed in one step, in scratch memory
that drift moves; for the answer, rows of its own say by how much. One that recomputes nothing has
nothing to stitch either, once its chunks are filled: its rows join the common steps at once.
"""

import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from typing import NamedTuple

from kvweave.engine.chunk_pages import ChunkPages
from kvweave.engine.chunk_room import ChunkRoom
from kvweave.engine.inbox import Outbox
from kvweave.engine.prefixes import ExactPrefixes
from kvweave.engine.request import FusedPart, LoadCost
from kvweave.engine.sequence import EngineSequence
from kvweave.errors import EngineClosed
from kvweave.fuse.encode.chunk_pass import Prefix
from kvweave.fuse.prefill import (
    OrderedPrefill,
    Prefilled,
    PromptFrame,
    StoredPrompt,
    can_share,
    named_kv,
    prober_of,
)
from kvweave.fuse.prepared import Prepared
from kvweave.fuse.protocol import Meanwhile
from kvweave.fuse.record import FuseRecord
from kvweave.fuse.shared_chunks import ScratchMemory
from kvweave.fuse.strategy import Strategy
from kvweave.kernels.segments import KERNEL_ROWS
from kvweave.kv.keys import ChunkKey
from kvweave.model.decoder import Decoder

THREADS = 8  # they only wait: the store's own pools read
SLOW_LOAD = 4.0  # a layer's bytes take so many times its computing: the pass would stand still
SHORT_LOAD_S = 0.005  # a gap between two tokens that is this much longer goes unnoticed


class PrefillMode(StrEnum):
    """How a fused prompt is computed. In its record, and counted."""

    JOINED = "joined"  # stitched first; then its rows run in the common steps, in slices
    STREAMED = "streamed"  # one step of its own: layers are laid as the pass gets there
    WHOLE = "whole"  # so too, because it cannot be cut: the pass itself chooses its rows


def prefill_mode_of(
    strategy: Strategy, *, alone: bool, held: bool, arrived: bool, copies: bool
) -> PrefillMode:
    """The mode of a request that is about to take its first step.

    `alone`: no other has anything to compute, and a layer that is laid when the pass gets there is
    still in the cache. `held`: a speculation, which should be able to end between two slices.
    `arrived`: its bytes are in host memory. `copies`: they still have to travel to a device, which
    a pass overlaps.
    """
    if not strategy.can_be_sliced:
        return PrefillMode.WHOLE
    if alone and (copies or not arrived or not held):
        return PrefillMode.STREAMED
    return PrefillMode.JOINED


def waits_outside(strategy: Strategy, cost: LoadCost | None, others_ready: bool) -> bool:
    """Whether a request should get all its bytes before it takes a step.

    Alone it never should. With others to compute, one that joins them is stitched at once, and
    they would wait for its bytes. A pass of its own overlaps them: it holds others up if it waits
    for most of its layers, not if bytes come faster than it computes.
    """
    if not others_ready:
        return False
    if cost is None:
        return True
    longest_s = SHORT_LOAD_S if strategy.can_be_sliced else SLOW_LOAD * cost.compute_s
    return cost.load_s >= longest_s


class LoadedPrompt(NamedTuple):
    """The end of a load. The engine thread, which takes it, closes the bytes."""

    sequence: EngineSequence
    result: StoredPrompt | BaseException  # the leased bytes, or what failed
    started_s: float  # by time.perf_counter


class ChunkLoader:
    """Gets the stored bytes of fused prompts. The engine thread calls it; threads of its own wait
    for the bytes and post a LoadedPrompt. The scheduler's ByteSource."""

    def __init__(
        self, num_layers: int, outbox: Outbox[LoadedPrompt], chunks: ChunkPages | None = None
    ) -> None:
        """`chunks` that lie in shared pages need not be loaded."""
        self._num_layers = num_layers
        self._outbox = outbox
        self._chunks = chunks
        self._threads: ThreadPoolExecutor | None = None
        self._loads: list[Future[None]] = []

    def open(self, part: FusedPart, resident: Collection[ChunkKey] = ()) -> StoredPrompt:
        """Take the lease and start loading, all but `resident` chunks. May wait for a tier to say
        what it has. Any thread."""
        return StoredPrompt(
            self._num_layers, part.chunks, part.store, part.strategy, part.computed, resident
        )

    def open_now(self, sequence: EngineSequence) -> StoredPrompt:
        """The bytes of a request that takes its step now: those that came ahead, unless a chunk
        that was in shared pages then has left them since."""
        part, stored = fused_part(sequence), sequence.stored
        resident, rounded = frozenset[ChunkKey](), frozenset[ChunkKey]()
        if sequence.shared is not None:
            resident, rounded = sequence.shared.filled, sequence.shared.rounded
        if stored is None or not stored.resident <= resident:
            if stored is not None:
                stored.close()
            stored = self.open(part, resident)
        stored.found(resident, rounded)
        return stored

    def _resident(self, sequence: EngineSequence, part: FusedPart) -> set[ChunkKey]:
        """Chunks of a request that it would find in shared pages now."""
        if self._chunks is None or sequence.copies:
            return set()
        if not can_share(part.strategy, self._num_layers):
            return set()
        keys = {key for chunk in part.chunks for key in (chunk.key, chunk.exact_key)}
        return self._chunks.holds(sequence.request.namespace, keys)

    def load_first(self, sequence: EngineSequence, *, others_ready: bool) -> bool:
        """Start to load if a request should have all its bytes before it takes a step."""
        part = sequence.request.fused
        if part is None or sequence.stored is not None:
            return False
        resident = self._resident(sequence, part)
        wanted = named_kv(part.chunks, part.store, part.strategy, part.computed)
        if all(key is None or key in resident for key, _ in wanted):
            return False  # there is nothing to wait for
        in_idle_time = sequence.progress.background  # whoever arrives must not wait for its bytes
        if not (in_idle_time or waits_outside(part.strategy, part.expected, others_ready)):
            return False
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="engine-load")
        started_s = time.perf_counter()
        load = self._threads.submit(self._load, sequence, part, resident, started_s)
        self._loads = [load, *(one for one in self._loads if not one.done())]
        return True

    @property
    def is_loading(self) -> bool:
        """Whether a LoadedPrompt is still to be posted."""
        return any(not load.done() for load in self._loads)

    def close(self) -> None:
        """Wait for what is under way: nothing that arrives later keeps a lease."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _load(
        self,
        sequence: EngineSequence,
        part: FusedPart,
        resident: Collection[ChunkKey],
        started_s: float,
    ) -> None:
        stored: StoredPrompt | None = None
        result: StoredPrompt | BaseException
        try:
            stored = self.open(part, resident)
            stored.arrive()
            result = stored
        except Exception as error:  # the engine thread must hear of it
            if stored is not None:
                stored.close()
            result = error
        try:
            self._outbox.post(LoadedPrompt(sequence, result, started_s))
        except EngineClosed:
            if stored is not None:
                stored.close()


def prefill(
    decoder: Decoder, sequence: EngineSequence, stored: StoredPrompt, prefixes: ExactPrefixes
) -> Prefilled:
    """Fill the request's pages with its prompt. What the tree has of it is copied in front."""
    part, kv = fused_part(sequence), sequence.own_kv
    kv.reserve(sequence.prompt_len)
    return stored.prefill(decoder, _frame(sequence, part, prefixes), kv, part.ratio)


def prefill_shared(
    decoder: Decoder,
    sequence: EngineSequence,
    stored: StoredPrompt,
    prefixes: ExactPrefixes,
    room: ChunkRoom,
    memory: ScratchMemory,
    meanwhile: Meanwhile | None,
) -> OrderedPrefill:
    """As `prefill`, over chunks in shared pages: what is computed goes to pages of its own. To be
    finished."""
    part = fused_part(sequence)
    frame = _frame(sequence, part, prefixes)
    return stored.prefill_shared(decoder, frame, room, memory, part.ratio, meanwhile)


def prepare_in_place(
    decoder: Decoder,
    sequence: EngineSequence,
    stored: StoredPrompt,
    prefixes: ExactPrefixes,
    room: ChunkRoom,
) -> tuple[Prepared, FuseRecord]:
    """As `prepare`, over filled chunks in shared pages of which nothing is recomputed."""
    frame = _frame(sequence, fused_part(sequence), prefixes)
    return stored.prepare_in_place(decoder, frame, room)


def is_scored(sequence: EngineSequence) -> bool:
    """Whether the device scores the rows of a request over shared chunks before its pass, and
    nothing else is waited for: all of them are filled."""
    part = fused_part(sequence)
    if sequence.shared is None or prober_of(part.strategy, part.ratio) is None:
        return False
    return len(sequence.shared.filled) == len(sequence.shared.chunks)


def lies_ready(sequence: EngineSequence) -> bool:
    """Whether a request over shared chunks has nothing to stitch: all of them are filled, none of
    their rows is recomputed, and what stands in front is in its pages. With many rows besides, as
    of chunks that are not stored, the pass over scratch is faster."""
    part = fused_part(sequence)
    if sequence.shared is None or (part.strategy.selector is not None and part.ratio):
        return False
    is_filled = len(sequence.shared.filled) == len(sequence.shared.chunks)
    if not is_filled or sequence.present < len(part.preamble.token_ids):
        return False
    return sequence.own_kv.capacity - sequence.present <= KERNEL_ROWS


def prepare(
    decoder: Decoder, sequence: EngineSequence, stored: StoredPrompt, prefixes: ExactPrefixes
) -> tuple[Prepared, FuseRecord]:
    """As `prefill`, up to the rows that are to be computed. The record has no compute time yet."""
    part, kv = fused_part(sequence), sequence.own_kv
    kv.reserve(sequence.prompt_len)
    return stored.prepare(decoder, _frame(sequence, part, prefixes), kv, part.ratio)


def fused_part(sequence: EngineSequence) -> FusedPart:
    part = sequence.request.fused
    assert part is not None, "a fused request says how"
    return part


def _frame(sequence: EngineSequence, part: FusedPart, prefixes: ExactPrefixes) -> PromptFrame:
    exact, num_exact = _exact(sequence, part, prefixes)
    return PromptFrame(exact, sequence.request.question, num_exact, part.asked, part.encoding)


def _exact(
    sequence: EngineSequence, part: FusedPart, prefixes: ExactPrefixes
) -> tuple[Prefix, int]:
    """The exact front of the prompt, and how many chunks it has."""
    lease = sequence.lease
    num_exact = sequence.num_exact_chunks(lease)
    if lease is None or not num_exact:
        return part.preamble, 0
    return prefixes.copy(lease, sequence.ids), num_exact  # a path is short, the buffer dense
