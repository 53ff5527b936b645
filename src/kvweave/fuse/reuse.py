"""Answer a prompt from the store: reuse what is there, compute what is not.

The plain form of reuse (ratio 0): chunk KV as stored, the question and missing chunks computed. A
chunk whose bytes turn out missing, damaged or late is computed like one that never was there, so a
failing store costs time and never an answer.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvweave.fuse.encode import Prefix
from kvweave.fuse.fused_pass import ChunkLost, Placement, fused_pass
from kvweave.fuse.protocol import Decoder, KVBuffer
from kvweave.kv.keys import ChunkKey
from kvweave.kv.residency import Miss
from kvweave.kv.store import KVStore


class Reused(NamedTuple):
    """A prefilled prompt, and what was reused for it."""

    logits: Tensor  # [V] of the last token
    reused: tuple[ChunkKey, ...]  # chunks whose KV came from the store
    computed: dict[ChunkKey, Miss]  # chunks that were computed, and why


def prefill_with_reuse(
    decoder: Decoder,
    preamble: Prefix,
    chunks: Sequence[tuple[ChunkKey, Sequence[int]]],
    question_ids: Sequence[int],
    store: KVStore,
    kv: KVBuffer,
) -> Reused:
    """Prefill preamble ‖ chunks ‖ question into `kv`. `chunks` are (key, token ids) in order."""
    prompt_ids = list(preamble.token_ids)
    spans = []
    for key, ids in chunks:
        spans.append(Placement(key, len(prompt_ids), len(ids)))
        prompt_ids += ids
    first_question = len(prompt_ids)
    prompt_ids += question_ids
    with store.acquire([key for key, _ in chunks]) as lease:
        transfer = store.load(lease)
        for key, header in transfer.headers().items():
            if len(header.layers) != decoder.spec.num_layers:
                transfer.lost[key] = Miss.CORRUPT  # not of this model, whatever its key says
        missing = {**lease.missing, **transfer.lost}
        while True:
            hits = [span for span in spans if span.key not in missing]
            rows = [
                position
                for span in spans
                if span.key in missing
                for position in range(span.start, span.start + span.num_tokens)
            ] + list(range(first_question, len(prompt_ids)))
            try:
                logits = fused_pass(
                    decoder, prompt_ids, rows, preamble, hits, transfer.wait_layer, kv
                )
            except ChunkLost as lost:  # computed instead; each turn has fewer chunks to lose
                # what arrived in the wrong shape is not lost to the transfer, only to us
                missing |= {key: transfer.lost.get(key, Miss.CORRUPT) for key in lost.keys}
                continue
            return Reused(logits, tuple(dict.fromkeys(span.key for span in hits)), missing)
