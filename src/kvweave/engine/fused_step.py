"""The own step of a fused request: into pages that belong to it alone.

Streamed, its whole prefill; joined, stitching and choosing rows, which are then computed in the
common steps. `loading.py` has the rule. Approximate rows come to lie in pages that only this
request reads: nothing of it is ever offered to the tree.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

import torch

from kvweave.engine.page_manager import PageManager
from kvweave.engine.request import FusedPart, LoadCost
from kvweave.engine.sequence import EngineSequence
from kvweave.errors import EngineClosed
from kvweave.fuse.encode.chunk_pass import Prefix
from kvweave.fuse.prefill import Around, Prefilled, StoredPrompt
from kvweave.fuse.prepared import Prepared
from kvweave.fuse.record import FuseRecord
from kvweave.fuse.strategy import Strategy
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.tree import TreeLease
from kvweave.model.decoder import Decoder

THREADS = 8  # they only wait: the store's own pools read
SLOW_LOAD = 4.0  # a layer's bytes take so many times its computing: the pass would stand still
SHORT_LOAD_S = 0.005  # nobody notices a gap between two tokens that is this much longer


class PrefillMode(StrEnum):
    """How a fused prompt is computed. In its record, and counted."""

    JOINED = "joined"  # stitched first; then its rows run in the common steps, in slices
    STREAMED = "streamed"  # one step of its own: layers are laid as the pass gets there
    WHOLE = "whole"  # so too, because it cannot be cut: the pass itself chooses its rows


def way_of(
    strategy: Strategy, *, alone: bool, held: bool, arrived: bool, copies: bool
) -> PrefillMode:
    """The way of a request that is about to take its first step.

    `alone`: nobody else has anything to compute, and a layer that is laid when the pass gets there
    is still in the cache. `held`: a guess, which should be able to end between two slices.
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


Loaded = StoredPrompt | BaseException


class Loading:
    """Waits for bytes on threads of its own. `post` brings a call to the engine thread."""

    def __init__(self, num_layers: int, post: Callable[[Callable[[], None]], None]) -> None:
        self._num_layers = num_layers
        self._post = post
        self._threads: ThreadPoolExecutor | None = None

    def open(self, part: FusedPart) -> StoredPrompt:
        """Take the lease and start loading. May wait for a tier to say what it has."""
        return StoredPrompt(self._num_layers, part.chunks, part.store, part.strategy, part.computed)

    def start(self, part: FusedPart, then: Callable[[Loaded], None]) -> None:
        """Get all bytes of a request; `then` hears on the engine thread, with the leased bytes or
        with what failed. Whoever hears it closes them."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="engine-load")
        self._threads.submit(self._load, part, then)

    def close(self) -> None:
        """Wait for what is under way: nothing that arrives later keeps a lease."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _load(self, part: FusedPart, then: Callable[[Loaded], None]) -> None:
        stored: StoredPrompt | None = None
        loaded: Loaded
        try:
            stored = self.open(part)
            stored.arrive()
            loaded = stored
        except Exception as error:  # whoever waits must hear of it
            if stored is not None:
                stored.close()
            loaded = error
        try:
            self._post(lambda: then(loaded))
        except EngineClosed:
            if stored is not None:
                stored.close()


def weave(
    decoder: Decoder, live: EngineSequence, stored: StoredPrompt, placing: PageManager
) -> Prefilled:
    """Fill the request's pages with its prompt. What the tree has of it is copied in front."""
    part = _part(live)
    return stored.prefill(decoder, _around(live, part, placing), live.kv, part.ratio)


def prepare(
    decoder: Decoder, live: EngineSequence, stored: StoredPrompt, placing: PageManager
) -> tuple[Prepared, FuseRecord]:
    """As `weave`, up to the rows that are to be computed. The record has no compute time yet."""
    part = _part(live)
    return stored.prepare(decoder, _around(live, part, placing), live.kv, part.ratio)


def _part(live: EngineSequence) -> FusedPart:
    part = live.request.fused
    assert part is not None, "a fused request says how"
    return part


def _around(live: EngineSequence, part: FusedPart, placing: PageManager) -> Around:
    exact, num_exact = _exact(live, part, placing)
    live.kv.reserve(live.prompt_len)
    return Around(exact, live.request.question, num_exact, part.asked, part.encoding)


def _exact(live: EngineSequence, part: FusedPart, placing: PageManager) -> tuple[Prefix, int]:
    """The exact front of the prompt, and how many chunks it has."""
    in_front = 1 + bool(live.request.preamble)  # nodes of a path before its first chunk
    num_exact = 0 if live.lease is None else max(0, len(live.lease.nodes) - in_front)
    if live.lease is None or not num_exact:
        return part.preamble(), 0
    return _prefix(live, live.lease, placing), num_exact


def _prefix(live: EngineSequence, lease: TreeLease, placing: PageManager) -> Prefix:
    """A leased path as one piece of KV. A copy: a path is short, and the buffer wants it dense."""
    pool, num_tokens = placing.pool, lease.num_tokens
    at = torch.tensor(placing.prefixes.table(lease), device=pool.keys.device)
    layers = (
        LayerKV(
            pool.keys[layer, at].flatten(0, 1)[:num_tokens],
            pool.values[layer, at].flatten(0, 1)[:num_tokens],
        )
        for layer in range(pool.keys.shape[0])
    )
    return Prefix(tuple(live.ids[:num_tokens]), tuple(layers))
