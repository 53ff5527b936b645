"""Fused prompts: one way from stored chunks to rows that are computed.

    open ─► lay out ─► choose rows ─┬─► all rows at once, in a step of its own
                                    └─► rows in slices, in the steps of all requests

Where the prompt lies is its `PromptRoom`: pages of its own, side by side, into which chunks are
copied, or pages of its own for what it computes and shared pages for its chunks (chunk_room.py).
Which rows are computed when is `runs_in_slices`. Nothing else differs.

Rows are approximate from the first reused chunk on, and nothing of that is ever offered to the
tree; chunks in front that are computed behind exact ones are (`EngineSequence.num_exact_parts`).
"""

from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

from kvweave.engine.chunk_loader import ChunkLoader
from kvweave.engine.chunk_room import ChunkRoom
from kvweave.engine.page_manager import PageManager
from kvweave.engine.prefixes import ExactPrefixes
from kvweave.engine.sequence import EngineSequence
from kvweave.fuse.prefill import OrderedPrefill, PromptFrame, StoredPrompt, scores_rows
from kvweave.fuse.prompt_layers import PromptRoom
from kvweave.fuse.protocol import Meanwhile
from kvweave.fuse.record import JOINED, STREAMED, WHOLE
from kvweave.fuse.shared_chunks import ScratchMemory
from kvweave.fuse.strategy import Strategy
from kvweave.fuse.transfer.own import OwnRoom
from kvweave.kernels.segments import KERNEL_ROWS
from kvweave.model.decoder import Decoder


class OrderedPrompt(NamedTuple):
    """A fused prompt all of whose rows are ordered. The caller finishes it."""

    sequence: EngineSequence
    prefill: OrderedPrefill
    started_s: float  # by time.perf_counter


class FusedPrompts:
    """Begins the prompts of fused requests. For the engine thread."""

    def __init__(
        self,
        decoder: Decoder,
        pages: PageManager,
        prefixes: ExactPrefixes,
        loader: ChunkLoader,
    ) -> None:
        self._decoder = decoder
        self._pages = pages
        self._prefixes = prefixes
        self._loader = loader
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
            return OwnRoom(sequence.own_kv)
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
    if sequence.shared is None or (part.strategy.selector is not None and part.ratio):
        return False
    if not sequence.shared.is_filled or sequence.present < len(part.preamble.token_ids):
        return False
    return sequence.own_kv.capacity - sequence.present <= KERNEL_ROWS
