"""How fused prompts get their bytes from the store.

Loading overlaps computing (FusionRAG, 7.3 of the algorithms reference):

    request by request   all bytes first, while other requests run; then it is computed
    layer by layer       the pass starts at once and waits for each layer as it gets there

The first leaves the device to requests that can use it, and its rows can run beside theirs; the
second is faster for a request that is alone. `waits_outside` is the rule between them.
"""

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from kvweave.engine.chunk_pages import ChunkPages
from kvweave.engine.request import FusedPart, LoadCost
from kvweave.engine.sequence import EngineSequence
from kvweave.errors import EngineClosed
from kvweave.fuse.prefill import StoredPrompt, can_share, named_kv
from kvweave.fuse.strategy import Strategy
from kvweave.kv.format.keys import ChunkKey

THREADS = 8  # they only wait: the store's own pools read
SLOW_LOAD = 4.0  # a layer's bytes take so many times its computing: the pass would stand still
SHORT_LOAD_S = 0.005  # a gap between two tokens that is this much longer goes unnoticed


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


@dataclass(eq=False)
class ChunkLoader:
    """Gets the stored bytes of fused prompts. The engine thread calls it; threads of its own wait
    for the bytes and post a LoadedPrompt. The scheduler's ByteSource."""

    _num_layers: int
    _post: Callable[[LoadedPrompt], None]
    _chunks: ChunkPages | None = None  # that lie in shared pages need not be loaded
    _threads: ThreadPoolExecutor | None = None
    _loads: list[Future[None]] = field(default_factory=list)

    def open(self, part: FusedPart, resident: Collection[ChunkKey] = ()) -> StoredPrompt:
        """Take the lease and start loading, all but `resident` chunks. May wait for a tier to say
        what it has. Any thread."""
        return StoredPrompt(
            self._num_layers, part.chunks, part.store, part.strategy, part.computed, resident
        )

    def open_now(self, sequence: EngineSequence) -> StoredPrompt:
        """The bytes of a request that takes its step now: those that came ahead, unless a chunk
        that was in shared pages then has left them since."""
        part, stored = sequence.fused_part, sequence.stored
        resident, rounded = frozenset[ChunkKey](), frozenset[ChunkKey]()
        if sequence.shared is not None:
            resident, rounded = sequence.shared.filled, sequence.shared.rounded
        if stored is None or not stored.resident <= resident:
            if stored is not None:
                stored.close()
            stored = self.open(part, resident)
        stored.note_resident(resident, rounded)
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
            self._post(LoadedPrompt(sequence, result, started_s))
        except EngineClosed:
            if stored is not None:
                stored.close()
