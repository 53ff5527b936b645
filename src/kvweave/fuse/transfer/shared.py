"""Chunks of a prompt in shared pages, and the bytes of those whose pages are still empty."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from kvweave.fuse.protocol import FusionDecoder
from kvweave.fuse.request import ChunkSpan, FuseRequest
from kvweave.fuse.shared_chunks import Filling, PromptRoom, SharedChunks
from kvweave.fuse.sources import LayerTransfer
from kvweave.fuse.strategy import Strategy
from kvweave.fuse.transfer.pipeline import open_source
from kvweave.kernels.host import on_device
from kvweave.kv.format.codec import LayerKV


@contextmanager
def open_shared(
    decoder: FusionDecoder,
    request: FuseRequest,
    room: PromptRoom,
    front: Sequence[LayerKV],
    layers: LayerTransfer,
    strategy: Strategy,
) -> Iterator[SharedChunks]:
    """The chunks of one prefill in pages; `layers` brings those whose pages are empty."""
    empty = {s.key: s for s in request.placed if not room.is_filled(s.key)}
    if not empty:
        yield SharedChunks(decoder, request, room, front, None, None)
        return
    filling = _filling(decoder, room, list(empty.values()))
    with open_source(decoder, filling.spans, layers, strategy, filling.rows) as source:
        yield SharedChunks(decoder, request, room, front, source, filling)


def _filling(decoder: FusionDecoder, room: PromptRoom, spans: Sequence[ChunkSpan]) -> Filling:
    slots = np.concatenate([room.chunk_slots(span.key) for span in spans])
    nth = np.concatenate([np.arange(span.num_tokens) for span in spans])
    both = torch.from_numpy(np.stack([slots, nth]))
    at, places = on_device(both, decoder.device).unbind()
    rows = at if room.pool.codes(0) is None else torch.arange(len(at), device=decoder.device)
    return Filling(list(spans), at, rows, decoder.angles(places))
