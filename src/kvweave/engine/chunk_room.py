"""What one fused request has in the pool while its prompt is computed over shared chunks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from kvweave.engine.page_manager import PageManager
from kvweave.engine.sequence import EngineSequence
from kvweave.engine.tombstones import Tombstones
from kvweave.fuse.needs import Needs
from kvweave.fuse.protocol import FusionDecoder, Prefix
from kvweave.fuse.request import ChunkSpan, FuseRequest
from kvweave.fuse.shared_chunks import ScratchMemory, SharedLayers, Slots
from kvweave.fuse.sources import LayerTransfer
from kvweave.fuse.transfer.shared import open_shared
from kvweave.kernels.types import SharedChunk
from kvweave.kv.format.keys import ChunkKey
from kvweave.model.paged_kv import KVPool
from kvweave.model.segmented_kv import SegmentedKV
from kvweave.types import ChunkId


class ChunkRoom:
    """The `PromptRoom` of a prompt over shared chunks, and the `PoolRoom` that its layers ask.
    Made for one pass, on its thread."""

    def __init__(
        self,
        sequence: EngineSequence,
        pages: PageManager,
        scratch: ScratchMemory,
        tombstones: Tombstones,
    ) -> None:
        assert isinstance(sequence.kv, SegmentedKV), "its chunks are shared"
        assert sequence.shared is not None, "its chunks are leased"
        self._sequence = sequence
        self._kv: SegmentedKV = sequence.kv
        self._lease = sequence.shared
        self._pages = pages
        self._scratch = scratch
        self._tombstones = tombstones
        self._laid_out: tuple[FuseRequest, Slots] | None = None
        self._shifts: dict[int, int] = {}  # where a chunk starts, and the slot of its shift

    @property
    def pool(self) -> KVPool:
        return self._kv.pool

    @property
    def num_present(self) -> int:
        return self._sequence.present

    def chunk_slots(self, key: ChunkKey) -> Slots:
        chunk = self._lease.chunks[key]
        if chunk.slots is None:
            chunk.slots = self._slots(chunk.pages, chunk.num_tokens, self.pool.chunk_page_tokens)
        return chunk.slots

    def is_filled(self, key: ChunkKey) -> bool:
        return self._lease.chunks[key].is_filled

    def own_slots(self, request: FuseRequest, num_rows: int) -> Slots:
        if num_rows > self._kv.own.capacity:
            placed = {span.key for span in request.placed}
            self._lease.drop([key for key in self._lease.chunks if key not in placed])
            self._pages.take_from_lost(self._sequence, num_rows)
        return self._slots(self._kv.page_table, num_rows, self.pool.page_tokens)

    def lay_out(self, request: FuseRequest, own_positions: Slots) -> None:
        self._laid_out = request, own_positions

    def shift_slots(self, spans: Sequence[ChunkSpan]) -> Slots:
        slots = self._slots(self._kv.shift_pages, len(spans), self.pool.page_tokens)
        assert len(slots) == len(spans), "there is a row for the shift of each chunk"
        starts = [span.start for span in spans]
        self._shifts = dict(zip(starts, slots.tolist(), strict=True))
        return slots

    def open(
        self,
        decoder: FusionDecoder,
        request: FuseRequest,
        front: Prefix,
        transfer: LayerTransfer,
        needs: Needs,
    ) -> AbstractContextManager[SharedLayers]:
        return open_shared(decoder, request, self, self._scratch, front, transfer, needs)

    def note_pass_finished(self, load_s: float, rounded: set[ChunkKey]) -> None:
        """Mark the chunks as filled, and drop the lease on those that are not read: chunks that
        were lost, or of which every row was computed anew."""
        assert self._laid_out is not None, "the pass began"
        placed = {span.key for span in self._laid_out[0].placed}
        self._lease.drop([key for key in self._lease.chunks if key not in placed])
        self._lease.fill(load_s, self._is_gone, rounded)
        read = {chunk.pages for chunk in self._kv.chunks}
        unread = [key for key, chunk in self._lease.chunks.items() if chunk.pages not in read]
        self._lease.drop(unread)

    def _is_gone(self, chunk_id: ChunkId) -> bool:
        """Whether a chunk was deleted since the request found it."""
        sequence = self._sequence
        return self._tombstones.is_gone(chunk_id, sequence.as_of, sequence.request.namespace)

    def note_pass_ordered(self) -> None:
        """Let rows that follow see the prompt's own rows, and the chunks that it does not compute
        anew."""
        assert self._laid_out is not None, "the pass began"
        request, own = self._laid_out
        is_own = np.zeros(len(request.prompt_ids), np.bool_)
        is_own[own] = True
        edges = np.array([(span.start, span.end) for span in request.placed], np.int64)
        counts = np.diff(np.searchsorted(own, edges.reshape(-1, 2)))[:, 0].tolist()
        masks = torch.from_numpy(is_own)
        chunks: list[SharedChunk] = []
        for span, count in zip(request.placed, counts, strict=True):
            if count < span.num_tokens:
                replaced = masks[span.start : span.end] if count else None
                pages = self._lease.chunks[span.key].pages
                shift = self._shifts.get(span.start)
                chunks.append(SharedChunk(pages, span.num_tokens, span.start, replaced, shift))
        self._kv.lay_out(own, chunks, len(request.prompt_ids))
        self._sequence.progress.elsewhere = self._kv.num_shared

    def _slots(self, pages: Sequence[int], count: int, size: int) -> Slots:
        at = np.array(pages[: -(-count // size)], np.int64)[:, None] * size + np.arange(size)
        return at.reshape(-1)[:count]
