"""Where a prompt's KV lies while it is fused: in a buffer of its own, or over shared pages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from kvweave.fuse.needs import Needs
from kvweave.fuse.prompt_layers import OwnLayers
from kvweave.fuse.protocol import FusionDecoder, KVBuffer, Prefix
from kvweave.fuse.request import ChunkSpan, FuseRequest
from kvweave.fuse.selectors.query_attention import LAYERS_AT_ONCE
from kvweave.fuse.shared_chunks import Filling, LayerScratch, PoolRoom, ScratchMemory, SharedLayers
from kvweave.fuse.sources import LayerTransfer
from kvweave.fuse.transfer.pipeline import open_source
from kvweave.kernels.host import on_device
from kvweave.kv.format.keys import ChunkKey


class OwnRoom:
    """The `PromptRoom` of a prompt that shares nothing."""

    def __init__(self, kv: KVBuffer) -> None:
        self._kv = kv

    @contextmanager
    def open(
        self,
        decoder: FusionDecoder,
        request: FuseRequest,
        front: Prefix,
        transfer: LayerTransfer,
        needs: Needs,
    ) -> Iterator[OwnLayers]:
        with open_source(decoder, request.placed, transfer, needs) as source:
            yield OwnLayers(decoder, request, front, source, self._kv)

    def note_pass_ordered(self) -> None:
        """Do nothing: rows look at the prompt's own buffer anyway."""

    def note_pass_finished(self, load_s: float, rounded: set[ChunkKey]) -> None:
        """Do nothing: no chunk was brought for others."""


@contextmanager
def open_shared(
    decoder: FusionDecoder,
    request: FuseRequest,
    room: PoolRoom,
    memory: ScratchMemory,
    front: Prefix,
    transfer: LayerTransfer,
    needs: Needs,
) -> Iterator[SharedLayers]:
    """Open the layers of a prompt over chunks in pages; `transfer` brings those whose pages are
    empty. The other arguments are those of `PromptRoom.open`."""
    num_scored = min(len(needs.key_layers), LAYERS_AT_ONCE)
    kv = LayerScratch(memory, len(request.prompt_ids), num_scored)
    empty = {s.key: s for s in request.placed if not room.is_filled(s.key)}
    if not empty:
        yield SharedLayers(decoder, request, room, front.layers, kv, None, None)
        return
    filling = _filling(decoder, room, list(empty.values()))
    with open_source(decoder, filling.spans, transfer, needs, filling.rows) as source:
        yield SharedLayers(decoder, request, room, front.layers, kv, source, filling)


def _filling(decoder: FusionDecoder, room: PoolRoom, spans: Sequence[ChunkSpan]) -> Filling:
    slots = np.concatenate([room.chunk_slots(span.key) for span in spans])
    nth = np.concatenate([np.arange(span.num_tokens) for span in spans])
    both = torch.from_numpy(np.stack([slots, nth]))
    at, places = on_device(both, decoder.device).unbind()
    rows = at if room.pool.codes(0) is None else torch.arange(len(at), device=decoder.device)
    return Filling(list(spans), at, rows, decoder.angles(places))
