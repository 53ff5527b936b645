"""The own step of a fused request: into pages that belong to it alone.

Streamed, its whole prefill; joined, stitching and choosing rows, which are then computed in the
common steps. `loading.py` has the rule. Approximate rows come to lie in pages that only this
request reads: nothing of it is ever offered to the tree.
"""

import torch

from kvweave.engine.page_manager import PageManager
from kvweave.engine.request import FusedPart
from kvweave.engine.sequence import EngineSequence
from kvweave.fuse.encode.chunk_pass import Prefix
from kvweave.fuse.prefill import Prefilled, PromptFrame, StoredPrompt
from kvweave.fuse.prepared import Prepared
from kvweave.fuse.record import FuseRecord
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.tree import TreeLease
from kvweave.model.decoder import Decoder


def weave(
    decoder: Decoder, live: EngineSequence, stored: StoredPrompt, placing: PageManager
) -> Prefilled:
    """Fill the request's pages with its prompt. What the tree has of it is copied in front."""
    part = _part(live)
    return stored.prefill(decoder, _frame(live, part, placing), live.kv, part.ratio)


def prepare(
    decoder: Decoder, live: EngineSequence, stored: StoredPrompt, placing: PageManager
) -> tuple[Prepared, FuseRecord]:
    """As `weave`, up to the rows that are to be computed. The record has no compute time yet."""
    part = _part(live)
    return stored.prepare(decoder, _frame(live, part, placing), live.kv, part.ratio)


def _part(live: EngineSequence) -> FusedPart:
    part = live.request.fused
    assert part is not None, "a fused request says how"
    return part


def _frame(live: EngineSequence, part: FusedPart, placing: PageManager) -> PromptFrame:
    exact, num_exact = _exact(live, part, placing)
    live.kv.reserve(live.prompt_len)
    return PromptFrame(exact, live.request.question, num_exact, part.asked, part.encoding)


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
