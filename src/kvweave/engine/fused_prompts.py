"""Fused prompts: one way from stored chunks to rows that are computed.

    open ─► lay out ─► choose rows ─┬─► all rows at once, in a step of its own
                                    └─► rows in slices, in the steps of all requests

Where the prompt lies is its `PromptRoom`: pages of its own, side by side, into which chunks are
copied, or pages of its own for what it computes and shared pages for its chunks (`ChunkRoom`).
Which rows are computed when is `runs_in_slices`. Nothing else differs.

Rows are approximate from the first reused chunk on, and nothing of that is ever offered to the
tree; chunks in front that are computed behind exact ones are (`EngineSequence.num_exact_parts`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from kvweave.engine.chunk_loader import ChunkLoader
from kvweave.engine.page_manager import PageManager
from kvweave.engine.prefixes import ExactPrefixes
from kvweave.engine.sequence import EngineSequence
from kvweave.engine.tombstones import Tombstones
from kvweave.fuse.prefill import OrderedPrefill, PromptFrame, StoredPrompt, scores_rows
from kvweave.fuse.prompt_layers import PromptAttempt, PromptRoom
from kvweave.fuse.protocol import Meanwhile
from kvweave.fuse.record import JOINED, STREAMED, WHOLE
from kvweave.fuse.request import ChunkSpan, FuseRequest
from kvweave.fuse.shared_chunks import ScratchMemory, SharedLayers, Slots
from kvweave.fuse.strategy import Strategy
from kvweave.fuse.transfer.rooms import OwnRoom, open_shared
from kvweave.kernels.segments import KERNEL_ROWS
from kvweave.kernels.types import SharedChunk
from kvweave.kv.format.keys import ChunkKey
from kvweave.model.decoder import Decoder
from kvweave.types import ChunkId


class OrderedPrompt(NamedTuple):
    """A fused prompt all of whose rows are ordered. The caller finishes it."""

    sequence: EngineSequence
    prefill: OrderedPrefill
    started_s: float  # by time.perf_counter


@dataclass(eq=False)
class FusedPrompts:
    """Begins the prompts of fused requests. For the engine thread."""

    _decoder: Decoder
    _pages: PageManager
    _prefixes: ExactPrefixes
    _loader: ChunkLoader

    def __post_init__(self) -> None:
        decoder = self._decoder
        self._scratch = ScratchMemory(decoder.spec, decoder.dtype, decoder.device)

    def begin(
        self,
        sequence: EngineSequence,
        started_s: float,
        *,
        is_alone: bool,
        meanwhile: Meanwhile | None = None,
    ) -> OrderedPrompt | None:
        """Lay a prompt out and choose its rows.

        Returns the prompt with all its rows ordered; None if they run in slices instead, in the
        common steps. `is_alone`: no other request has anything to compute. Raises RoomLost, and
        what the device raises.
        """
        part, room = sequence.fused_part, self._room(sequence)
        with closing(self._loader.open_now(sequence)) as stored:
            sequence.stored = None
            frame = self._frame(sequence)
            if self._runs_in_slices(sequence, stored, is_alone):
                prepared, record = stored.prepare(self._decoder, frame, room, part.ratio)
                sequence.fuse_record = replace(record, way=JOINED)
                sequence.join(prepared)
                return None
            ordered = stored.order(self._decoder, frame, room, part.ratio, meanwhile)
        return OrderedPrompt(sequence, ordered, started_s)

    def waits_only_for_scores(self, sequence: EngineSequence) -> bool:
        """Whether the host waits for nothing but the scores of a prompt's rows before its pass: the
        prompt reads shared chunks, and all of them are filled."""
        part, num_layers = sequence.fused_part, self._decoder.spec.num_layers
        if sequence.shared is None or not scores_rows(part.strategy, part.ratio, num_layers):
            return False
        return sequence.shared.is_filled

    def _room(self, sequence: EngineSequence) -> PromptRoom:
        """Return the place of a prompt's KV: shared chunk pages if it leased some, else its own
        pages."""
        if sequence.shared is None:
            return OwnRoom(sequence.kv)
        return ChunkRoom(sequence, self._pages, self._scratch, self._prefixes.tombstones)

    def _frame(self, sequence: EngineSequence) -> PromptFrame:
        """Return what stands around the chunks that are not exact: the exact KV in front, and the
        question."""
        part, lease = sequence.fused_part, sequence.lease
        num_exact = sequence.num_exact_chunks(lease)
        exact = part.preamble
        if lease is not None and num_exact:  # a path is short, the buffer dense
            exact = self._prefixes.copy(lease, sequence.ids)
        return PromptFrame(exact, sequence.request.question, num_exact, part.asked, part.encoding)

    def _runs_in_slices(
        self, sequence: EngineSequence, stored: StoredPrompt, is_alone: bool
    ) -> bool:
        """Whether the rows of a prompt join the common steps.

        A prompt over shared chunks joins them only if nothing is to be laid; else what is
        recomputed drifts in scratch memory, in one pass.
        """
        if sequence.shared is not None:
            return _has_nothing_to_lay(sequence)
        progress = sequence.progress
        return runs_in_slices(
            sequence.fused_part.strategy,
            # one in idle time ends between two slices
            is_alone=is_alone and not progress.background,
            is_guess=progress.held,
            has_arrived=stored.has_arrived,
            travels=self._decoder.device.type == "cuda",
        )


class ChunkRoom:
    """What one request has in the pool while its prompt is computed over shared chunks: the
    `PromptRoom` of a prompt over shared chunks, and the `PoolRoom` that its layers ask.
    Made for one pass, on its thread."""

    def __init__(
        self,
        sequence: EngineSequence,
        pages: PageManager,
        scratch: ScratchMemory,
        tombstones: Tombstones,
    ) -> None:
        assert sequence.shared is not None, "its chunks are leased"
        self._sequence = sequence
        self._kv = sequence.kv
        self.pool = self._kv.pool
        self._lease = sequence.shared
        self._pages = pages
        self._scratch = scratch
        self._tombstones = tombstones
        self._laid_out: tuple[FuseRequest, Slots] | None = None
        self._shifts: dict[int, int] = {}  # where a chunk starts, and the slot of its shift

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
        if num_rows > self._kv.capacity:
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

    def open(self, attempt: PromptAttempt) -> AbstractContextManager[SharedLayers]:
        return open_shared(attempt, self, self._scratch)

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


def runs_in_slices(
    strategy: Strategy, *, is_alone: bool, is_guess: bool, has_arrived: bool, travels: bool
) -> bool:
    """Whether the rows of a prompt in pages of its own join the common steps.

    Rows that the pass itself chooses cannot. Alone, a pass of its own is faster: a layer that is
    laid when the pass gets there is still in the cache, and bytes that have not `has_arrived` in
    host memory, or from there still `travels` to a device, overlap with it. A guess should be able
    to end between two slices.
    """
    if not strategy.can_be_sliced:
        return False
    return not is_alone or (is_guess and has_arrived and not travels)


def word_for_pass(sequence: EngineSequence) -> str:
    """Return the word by which records name a prompt that was computed in a step of its own."""
    return STREAMED if sequence.fused_part.strategy.can_be_sliced else WHOLE


def _has_nothing_to_lay(sequence: EngineSequence) -> bool:
    """Whether a prompt over shared chunks can run in slices at once: all chunks are filled, none of
    their rows is recomputed, and what stands in front is in its pages.

    With many other rows, as of chunks that are not stored, this is False: the pass over scratch is
    faster.
    """
    part = sequence.fused_part
    if sequence.shared is None or part.strategy.recomputes(part.ratio):
        return False
    if not sequence.shared.is_filled or sequence.present < len(part.preamble.token_ids):
        return False
    return sequence.kv.capacity - sequence.present <= KERNEL_ROWS
