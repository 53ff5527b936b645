"""Prefill a prompt from the store: reuse what is there, recompute what matters, compute the rest.

A chunk whose bytes turn out missing, damaged or late is computed like one that never was there, so
a failing store costs time and never an answer.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from kvweave.fuse.encode import Prefix
from kvweave.fuse.fuse import check_ratio, fuse
from kvweave.fuse.pipeline import open_source
from kvweave.fuse.protocol import Decoder, KVBuffer
from kvweave.fuse.record import FuseRecord, Stages, chunk_records, token_states
from kvweave.fuse.request import classify
from kvweave.fuse.sources import ChunkLost
from kvweave.fuse.stitched import Stitched
from kvweave.fuse.strategy import Strategy
from kvweave.kv.keys import ChunkKey
from kvweave.kv.residency import Miss, Residency
from kvweave.kv.store import KVStore
from kvweave.kv.transfers import Lease, Transfer


class PromptChunk(NamedTuple):
    """A chunk of a prompt and the names of its stored KV."""

    token_ids: tuple[int, ...]
    key: ChunkKey  # behind its encoding context
    exact_key: ChunkKey  # isolated; the same as `key` if that is the encoding context


class Prefilled(NamedTuple):
    """A prefilled prompt, and how it came about."""

    logits: Tensor  # [V] of the last token
    record: FuseRecord


def prefill_from_store(
    decoder: Decoder,
    preamble: Prefix,
    chunks: Sequence[PromptChunk],
    question_ids: Sequence[int],
    store: KVStore,
    kv: KVBuffer,
    strategy: Strategy,
    ratio: float,
    *,
    asked: tuple[int, int] | None = None,
    encoding: str = "",
    computed: Mapping[int, str] | None = None,
) -> Prefilled:
    """Prefill preamble ‖ chunks ‖ question into `kv`, as `strategy` says.

    `computed` are places of chunks that are computed even if they are stored, each with the reason
    that the record gives: a slow tier can cost more than it saves.
    """
    computed = computed or {}
    check_ratio(ratio)
    started_s = time.perf_counter()
    named = _named(chunks, store, strategy, computed)
    wanted = [key for key, _ in named if key is not None]
    needs = strategy.needs(decoder.spec.num_layers)
    with store.acquire(wanted) as lease:
        transfer = store.load(lease, sorted({*needs.key_layers, *needs.value_layers} - {0}))
        missing = _missing(decoder, lease, transfer)
        while True:
            present = set(wanted) - missing.keys()
            first_is_exact = bool(chunks) and named[0][0] == chunks[0].exact_key
            request = classify(
                preamble.token_ids,
                [(key or _NEVER, ids) for key, ids in named],
                question_ids,
                present=present,
                first_is_exact=first_is_exact,
                asked=asked,
            )
            tried_s = time.perf_counter()  # until here: waiting for headers, and for what was lost
            try:
                with open_source(decoder, request.placed, transfer, strategy) as source:
                    fused = fuse(
                        decoder,
                        request,
                        Stitched(decoder, request, preamble, source, kv),
                        kv,
                        strategy.selector,
                        ratio,
                        drift=strategy.drift,
                        mask=strategy.mask,
                    )
            except ChunkLost as lost:  # computed instead; each turn has fewer chunks to lose
                # what arrived in the wrong shape is not lost to the transfer, only to us
                missing |= {key: transfer.lost.get(key, Miss.CORRUPT) for key in lost.keys}
                continue
            sizes = {key: header.total_bytes for key, header in transfer.headers().items()}
            loaded: Counter[str] = Counter()
            for key in {span.key for span in request.placed}:
                loaded[lease.tiers[key]] += sizes.get(key, 0)
            record = FuseRecord(
                strategy=strategy.name,
                ratio=ratio,
                encoding=encoding,
                token_ids=request.prompt_ids,
                states=token_states(request, fused.recomputed),
                chunks=chunk_records(request, fused.recomputed, lease.tiers, missing, computed),
                work=fused.work,
                loaded_bytes=dict(loaded),
                stages=Stages(
                    load=(fused.load_s + tried_s - started_s) * 1e3,
                    select=fused.select_s * 1e3,
                    compute=fused.pass_s * 1e3,
                ),
                arrived_s=transfer.seconds(),
            )
            return Prefilled(fused.logits, record)


_NEVER = ChunkKey(b"")  # the key of a chunk that a strategy does not want from the store


def _named(
    chunks: Sequence[PromptChunk],
    store: KVStore,
    strategy: Strategy,
    computed: Mapping[int, str],
) -> list[tuple[ChunkKey | None, tuple[int, ...]]]:
    """Which stored KV each chunk takes; None computes it.

    The first chunk takes its isolated KV if the store has it: there, and only there, it is exact.
    """
    named: list[tuple[ChunkKey | None, tuple[int, ...]]] = []
    for i, chunk in enumerate(chunks):
        key: ChunkKey | None = chunk.key
        if i in computed:
            named.append((None, chunk.token_ids))
            continue
        if i == 0 and chunk.key != chunk.exact_key:
            (peek,) = store.peek([chunk.exact_key])
            is_stored = peek.residency is not Residency.ABSENT
            # a strategy that takes nothing else asks all the same, so that the miss is on record
            key = chunk.exact_key if is_stored or strategy.reuses == "exact" else chunk.key
        if strategy.reuses == "none" or (
            strategy.reuses == "exact" and not (i == 0 and key == chunk.exact_key)
        ):
            key = None
        named.append((key, chunk.token_ids))
    return named


def _missing(decoder: Decoder, lease: Lease, transfer: Transfer) -> dict[ChunkKey, Miss]:
    for key, header in transfer.headers().items():
        if len(header.layers) != decoder.spec.num_layers:
            transfer.lost[key] = Miss.CORRUPT  # not of this model, whatever its key says
    return {**lease.missing, **transfer.lost}
