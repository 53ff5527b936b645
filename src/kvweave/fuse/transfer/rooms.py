"""Where a prompt's KV lies while it is fused: in a buffer of its own, or over shared pages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from kvweave.fuse.prompt_layers import OwnLayers, PromptAttempt
from kvweave.fuse.protocol import KVBuffer
from kvweave.fuse.request import ChunkSpan
from kvweave.fuse.selectors.query_attention import LAYERS_AT_ONCE
from kvweave.fuse.shared_chunks import LayerScratch, PoolRoom, ScratchMemory, SharedLayers
from kvweave.fuse.transfer.pipeline import open_source
from kvweave.kernels.host import on_device
from kvweave.kv.format.keys import ChunkKey


class OwnRoom:
    """The `PromptRoom` of a prompt that shares nothing."""

    def __init__(self, kv: KVBuffer) -> None:
        self._kv = kv

    @contextmanager
    def open(self, attempt: PromptAttempt) -> Iterator[OwnLayers]:
        decoder, request, front, transfer, needs = attempt
        with open_source(decoder, request.placed, transfer, needs) as source:
            yield OwnLayers(decoder, request, front, source, self._kv)

    def note_pass_ordered(self) -> None:
        """Do nothing: rows look at the prompt's own buffer anyway."""

    def note_pass_finished(self, load_s: float, rounded: set[ChunkKey]) -> None:
        """Do nothing: no chunk was brought for others."""


@contextmanager
def open_shared(
    attempt: PromptAttempt, room: PoolRoom, memory: ScratchMemory
) -> Iterator[SharedLayers]:
    """Open the layers of a prompt over chunks in pages; those whose pages are empty are brought."""
    decoder, request, _, transfer, needs = attempt
    num_scored = min(len(needs.key_layers), LAYERS_AT_ONCE)
    kv = LayerScratch(memory, len(request.prompt_ids), num_scored)
    empty = list({s.key: s for s in request.placed if not room.is_filled(s.key)}.values())
    if not empty:
        yield SharedLayers(attempt, room, kv)
        return
    slots = on_device(_slots_of(room, empty), decoder.device)
    # codes are made of what is laid side by side
    is_coded = room.pool.codes(0) is not None
    rows = torch.arange(len(slots), device=decoder.device) if is_coded else slots
    with open_source(decoder, empty, transfer, needs, rows) as source:
        yield SharedLayers(attempt, room, kv, source.placer, slots)


def _slots_of(room: PoolRoom, spans: Sequence[ChunkSpan]) -> Tensor:
    return torch.from_numpy(np.concatenate([room.chunk_slots(span.key) for span in spans]))
