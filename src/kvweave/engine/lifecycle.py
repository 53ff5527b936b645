"""The life of a request: it begins, loads, is computed, answers and ends. On the engine thread."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from kvweave.engine.chunk_pages import ChunkPages
from kvweave.engine.chunk_room import ChunkRoom
from kvweave.engine.fair_ranks import share_of
from kvweave.engine.fused_step import (
    ChunkLoader,
    LoadedPrompt,
    PrefillMode,
    fused_part,
    lies_ready,
    prefill,
    prefill_mode_of,
    prefill_shared,
    prepare,
    prepare_in_place,
)
from kvweave.engine.offload import ArrivedCopy
from kvweave.engine.page_manager import PageManager, RoomLost
from kvweave.engine.prefixes import ExactPrefixes, path_of
from kvweave.engine.progress import Progress
from kvweave.engine.reference import check_prompt
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.runner import SliceResult, StepOutput
from kvweave.engine.sampling import Sampler
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import EngineSequence, is_plainly_greedy
from kvweave.engine.stats import EngineCounts, exact_record, joined_record
from kvweave.engine.warm_up import WarmUp
from kvweave.errors import NoDeviceMemory, NoNumbers, PromptTooLong, RequestError
from kvweave.fuse.prefill import OrderedPrefill, Prefilled, StoredPrompt
from kvweave.fuse.protocol import Meanwhile
from kvweave.fuse.record import FuseRecord
from kvweave.fuse.shared_chunks import ScratchMemory
from kvweave.kernels.recording import is_out_of_memory
from kvweave.kv.keys import ChunkKey
from kvweave.model.decoder import Decoder
from kvweave.types import ChunkId

log = logging.getLogger(__name__)

LINK_BYTES_PER_S = 50e9  # to a device, or from memory to memory: what a load takes at least
# What other threads leave for the engine thread: a ticket that is new, released or cancelled, the
# end of something that was under way, or a job.
News = Ticket | LoadedPrompt | ArrivedCopy | Callable[[], None]


class OrderedPrompt(NamedTuple):
    """A fused prompt over shared chunks that the device is at."""

    sequence: EngineSequence
    prefill: OrderedPrefill
    room: ChunkRoom  # what it has in the pool
    rounded: set[ChunkKey]  # of its chunks, those that a codec rounded
    started_s: float  # by time.perf_counter
    can_wait: bool  # other prompts may begin before it is finished


class Lifecycle:
    """Knows every request that has not ended. Whatever ends one, all it holds goes back.

    The engine thread owns it; any thread calls `check` and reads `sequences` and `counts`.
    """

    def __init__(
        self,
        decoder: Decoder,
        scheduler: Scheduler[EngineSequence],
        pages: PageManager,
        prefixes: ExactPrefixes,
        loader: ChunkLoader,
        warm_up: WarmUp,
        chunks: ChunkPages | None = None,
    ) -> None:
        self._decoder = decoder
        self._warm_up = warm_up
        self._chunks = chunks
        self._scratch = ScratchMemory(decoder.spec, decoder.dtype, decoder.device)
        self._scheduler = scheduler
        self._pages = pages
        self._prefixes = prefixes
        self._loader = loader
        self._arrivals = 0
        self.sequences: dict[Ticket, EngineSequence] = {}
        self.counts = EngineCounts()
        self.failed_in_row = 0  # requests, since the last token was handed out

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, nothing under way of which News will come, and nothing to be
        done in idle time."""
        under_way = self._loader.is_loading or self._prefixes.is_offloading
        return not (self.sequences or under_way) and self._warm_up.due_s is None

    @property
    def due_s(self) -> float | None:
        """Seconds until `work_ahead` has something to do without any News; None: never."""
        return None if self.sequences else self._warm_up.due_s

    def work_ahead(self) -> bool:
        """There is nothing to compute. While there is no request either, kernels are compiled and
        steps recorded ahead of their use, and exact KV is copied ahead of its leaving the pool.
        False: there is nothing more to do at once."""
        if self.sequences:
            return False
        if self._warm_up.step():
            return True
        self._prefixes.replicate_some()
        return False

    def hear(self, news: News) -> None:
        """Something was posted to the engine thread."""
        match news:
            case Ticket():
                self._heard_of(news)
            case LoadedPrompt():
                self._loaded(news)
            case ArrivedCopy():
                self._prefixes.settle(news)
            case job:
                job()

    def _heard_of(self, ticket: Ticket) -> None:
        """A ticket is new, or its owner released or cancelled it."""
        sequence = self.sequences.get(ticket)
        if ticket.is_cancelled:
            self.end(ticket)
        elif sequence is not None:
            self._release(sequence)
        elif not ticket.is_done:
            self._begin(ticket)

    def _begin(self, ticket: Ticket) -> None:
        request = ticket.request
        ids = request.prompt_ids
        self._arrivals += 1
        own_step = request.fused is not None
        share = share_of(request.namespace)
        rank: float = self._arrivals  # in the background all wait in one line
        if not request.background:
            rank = self._scheduler.ranks.rank(share, len(ids))
        sequence = EngineSequence(
            progress=Progress(
                rank,
                len(ids),
                ticket.is_held,
                own_step=own_step,
                background=request.background,
                tenant=share,
            ),
            request=request,
            ticket=ticket,
            prompt_len=len(ids),
            ids=ids,
            room=min(
                len(request.forced) or request.sampling.max_tokens, self._most_tokens() - len(ids)
            ),
            sampler=_sampler(request),
            kv=self._pages.empty_kv(),
            as_of=self._prefixes.as_of(request),
            path=path_of(request.namespace, request.preamble, request.chunks),
        )
        self.sequences[ticket] = sequence
        self._scheduler.add(sequence)

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Raise RequestError unless a prompt can be computed here. Any thread."""
        spec = self._decoder.spec
        check_prompt(prompt_ids, spec.vocab_size, spec.max_context)
        most = self._pages.most_tokens
        if len(prompt_ids) >= most:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens, the KV pool holds {most} with the "
                "answer; send less text or give the engine more pool_tokens"
            )

    def check_answer(self, request: EngineRequest) -> None:
        """Raise RequestError unless what is asked about the answer makes sense. Any thread."""
        size = self._decoder.spec.vocab_size
        if any(not 0 <= token_id < size for token_id in request.forced):
            raise RequestError(f"`forced` has token ids outside the vocabulary of {size}")
        if request.watched < 0:
            raise RequestError(f"watched must be 0 or more, got {request.watched}")

    def _most_tokens(self) -> int:
        return min(self._decoder.spec.max_context, self._pages.most_tokens)

    def _loaded(self, loaded: LoadedPrompt) -> None:
        """The bytes of a request are there, or will never be."""
        sequence, result, started_s = loaded
        sequence.ticket.timeline.loading_s += time.perf_counter() - started_s
        if isinstance(result, BaseException):
            self.end(sequence.ticket, result)
        elif sequence.ticket not in self.sequences:  # cancelled meanwhile
            result.close()
        else:
            sequence.stored = result
            self._scheduler.add(sequence)

    def _release(self, sequence: EngineSequence) -> None:
        """A held request goes on."""
        if sequence.progress.held:
            self.counts.released(sequence)
        logits, sequence.logits = sequence.logits, None
        self._scheduler.release(sequence)
        if logits is not None:
            self._answer(sequence, logits)

    def hand_out(self, output: StepOutput) -> None:
        """Give every request what a common step computed of it."""
        shared = len(output.results) > 1
        for result in output.results:
            self._hand_out(result, output.seconds, shared)

    def _hand_out(self, result: SliceResult, seconds: float, shared: bool) -> None:
        sequence, num_rows = result.slice
        if result.error is not None:
            self.end(sequence.ticket, result.error)
            return
        was_sparse = sequence.progress.sparse is not None
        sequence.progress.advance(num_rows)
        if was_sparse and sequence.progress.sparse is None:
            self.counts.add(f"fused_{PrefillMode.JOINED}")
        self._offer(sequence)
        sequence.ticket.timeline.stepped(seconds, shared)
        if result.logits is None:
            return
        if sequence.ticket.record is None:
            is_fused = sequence.request.fused is not None
            sequence.ticket.record = (joined_record if is_fused else exact_record)(sequence)
        self._answer(sequence, result.logits, result.likeliest)

    def take_own_step(
        self, sequence: EngineSequence, meanwhile: Meanwhile | None = None
    ) -> OrderedPrompt | None:
        """The own step of a fused request: its whole prefill, or what must be done at once.

        With `meanwhile` a prefill over shared chunks may only be ordered: what comes back is then
        to be finished. What it does may end other requests, and must leave this one alone.
        """
        started_s = time.perf_counter()
        prefilled: Prefilled | None = None
        try:
            stored = self._loader.open_now(sequence)
            try:
                mode = self._mode(sequence, stored)
                self.counts.add("fused_begun")
                if sequence.shared is not None and mode is PrefillMode.JOINED:
                    room = ChunkRoom(sequence, self._pages)
                    prepared, record = prepare_in_place(
                        self._decoder, sequence, stored, self._prefixes, room
                    )
                    self.counts.add("fused_shared")
                elif sequence.shared is not None:
                    ordered = self._order_shared(sequence, stored, started_s, meanwhile)
                    if meanwhile is not None and ordered.can_wait:
                        sequence.finish_prompt()  # it has nothing more to compute
                        return ordered
                    prefilled = self._finish_shared(ordered)
                elif mode is PrefillMode.JOINED:
                    prepared, record = prepare(self._decoder, sequence, stored, self._prefixes)
                else:
                    prefilled = prefill(self._decoder, sequence, stored, self._prefixes)
            finally:
                stored.close()
                sequence.stored = None
        except RoomLost:
            sequence.copies = True
            self._scheduler.begin_again(sequence)
            return None
        except Exception as error:  # this request's, and no other's
            self.end(sequence.ticket, error)
            return None
        if prefilled is not None:
            self._prefilled(sequence, prefilled, mode, started_s)
            return None
        seconds = time.perf_counter() - started_s
        sequence.ticket.timeline.stepped(seconds, False)
        sequence.fuse_record = replace(record, way=str(mode))
        sequence.apart_s += seconds
        sequence.join(prepared)
        self._offer(sequence)
        return None

    def finish_own_step(self, ordered: OrderedPrompt) -> None:
        """Wait for a prefill that was ordered, and hand out its first token."""
        sequence = ordered.sequence
        if self.sequences.get(sequence.ticket) is not sequence:
            return  # it has ended meanwhile, and given back what it held
        try:
            prefilled = self._finish_shared(ordered)
        except Exception as error:  # the device's
            self.end(sequence.ticket, error)
            return
        self._prefilled(sequence, prefilled, PrefillMode.STREAMED, ordered.started_s)

    def _prefilled(
        self, sequence: EngineSequence, prefilled: Prefilled, mode: PrefillMode, started_s: float
    ) -> None:
        """A prompt was computed in a step of its own."""
        sequence.ticket.timeline.stepped(time.perf_counter() - started_s, False)
        sequence.fuse_record = replace(prefilled.record, way=str(mode))
        sequence.finish_prompt()
        self._offer(sequence)
        self.counts.add(f"fused_{mode}")
        if sequence.ticket.record is None:
            sequence.ticket.record = sequence.fuse_record
        if sequence.progress.known == sequence.prompt_len:  # else preempted while it answered
            self._answer_first(sequence, prefilled)

    def _offer(self, sequence: EngineSequence) -> None:
        taken = self._pages.offer(sequence)
        if sequence.request.fused is not None:
            self.counts.add("fused_offered", taken)

    def _order_shared(
        self,
        sequence: EngineSequence,
        stored: StoredPrompt,
        started_s: float,
        meanwhile: Meanwhile | None,
    ) -> OrderedPrompt:
        """Order a prefill over shared chunks. The next prompt may begin before it is finished if it
        brings none of them, and has not answered before its pages were taken away."""
        assert sequence.shared is not None, "its chunks are leased"
        is_filled = len(sequence.shared.filled) == len(sequence.shared.chunks)
        is_first = sequence.progress.known == sequence.prompt_len
        room = ChunkRoom(sequence, self._pages)
        made = prefill_shared(
            self._decoder, sequence, stored, self._prefixes, room, self._scratch, meanwhile
        )
        rounded = stored.rounded()
        return OrderedPrompt(sequence, made, room, rounded, started_s, is_filled and is_first)

    def _finish_shared(self, ordered: OrderedPrompt) -> Prefilled:
        """Wait for a prefill over shared chunks: they are filled from now on."""
        prefilled, sequence, room = ordered.prefill.finish(), ordered.sequence, ordered.room
        assert self._chunks is not None, "chunks are shared"
        assert sequence.shared is not None, "and leased"
        placed = room.placed
        sequence.shared.drop([key for key in sequence.shared.chunks if key not in placed])
        is_gone = partial(self._is_gone, sequence)
        cost_s = self._cost_of(prefilled.record)
        self._chunks.filled(sequence.shared, cost_s, is_gone, ordered.rounded)
        sequence.shared.drop(room.unread)
        self.counts.add("fused_shared")
        return prefilled

    def _is_gone(self, sequence: EngineSequence, chunk_id: ChunkId) -> bool:
        tombstones, tenant = self._prefixes.tombstones, sequence.request.namespace
        return tombstones.is_gone(chunk_id, sequence.as_of, tenant)

    def _cost_of(self, record: FuseRecord) -> float:
        """What bringing the chunks of a prompt cost: what it waited for them, and at least what
        their bytes take over the link."""
        travelled = sum(record.loaded_bytes.values()) / LINK_BYTES_PER_S
        return max(record.stages.load / 1e3, travelled)

    def _mode(self, sequence: EngineSequence, stored: StoredPrompt) -> PrefillMode:
        if sequence.shared is not None:
            return PrefillMode.JOINED if lies_ready(sequence) else PrefillMode.STREAMED
        return prefill_mode_of(
            fused_part(sequence).strategy,
            # one in the background gives way between two slices
            alone=not sequence.progress.background and self._scheduler.is_alone(sequence),
            held=sequence.progress.held,
            arrived=stored.has_arrived,
            copies=self._decoder.device.type == "cuda",
        )

    def _answer_first(self, sequence: EngineSequence, prefilled: Prefilled) -> None:
        """As `_answer`, of a prompt that was computed in a step of its own."""
        first, likeliest = prefilled.first, None
        if first is not None and is_plainly_greedy([sequence]):
            likeliest = first.token_id
        lead = None if first is None else first.lead
        self._answer(sequence, prefilled.logits, likeliest, lead)

    def _answer(
        self,
        sequence: EngineSequence,
        logits: Tensor,
        likeliest: int | None = None,
        lead: float | None = None,
    ) -> None:
        """Draw a token and hand it out; a held request keeps the logits instead. The `likeliest`
        token, if it is all that matters, and its `lead` over the next, if they are known."""
        in_background = sequence.progress.background
        try:
            if sequence.progress.held:
                sequence.logits = logits.clone()
                sequence.ticket.timeline.prefilled_s = time.perf_counter()
                return
            if not sequence.answered and _is_close_call(sequence, logits, lead):
                self._compute_exactly(sequence)
                return
            if not (sequence.answered or in_background):
                self.counts.first_token(sequence)
            choice = sequence.choose(logits, likeliest)
        except Exception as error:  # the device's, or logits that are no numbers: this request's
            if isinstance(error, NoNumbers):
                self._drop_unsound(sequence)
            self.end(sequence.ticket, error)
            return
        self.failed_in_row = 0
        if not in_background:
            self.counts.add("tokens_answered")
        if sequence.take(choice):
            self.end(sequence.ticket)

    def _drop_unsound(self, sequence: EngineSequence) -> None:
        """What a request read may be to blame: then the next one must not read it, too."""
        try:
            dropped = self._pages.drop_unsound(sequence)
        except RuntimeError as error:  # CUDA's: the request has an error to end with already
            log.warning("what an answer was computed from could not be looked at: %s", error)
            return
        if dropped:
            log.warning("KV on the device held what is no number: %d chunks or prefixes", dropped)
        self.counts.add("kv_distrusted", dropped)

    def _compute_exactly(self, sequence: EngineSequence) -> None:
        """A fused prompt begins again, as one of which nothing is approximated."""
        self.counts.add("fused_close_calls")
        sequence.request = replace(sequence.request, fused=None)
        sequence.fuse_record = sequence.ticket.record = None
        self._scheduler.begin_again(sequence)

    def end(self, ticket: Ticket, error: BaseException | None = None) -> None:
        """A request is finished, cancelled or failed."""
        error = _told(error)
        sequence = self.sequences.pop(ticket, None)
        self._warm_up.request_ended()
        try:
            if sequence is not None:
                self._take_back(sequence)
                how = "failed" if error else "aborted" if ticket.is_cancelled else "finished"
                whose = "background" if ticket.request.background else "requests"
                self.counts.add(f"{whose}_{how}")
                self.failed_in_row += how == "failed"
        finally:  # whatever is wrong with the books, its reader must not wait for ever
            ticket.end(error)

    def _take_back(self, sequence: EngineSequence) -> None:
        if sequence.progress.held:
            self.counts.dropped(sequence)
        self._scheduler.remove(sequence)
        if sequence.stored is not None:
            sequence.stored.close()
        self._pages.retire(sequence)


def _is_close_call(sequence: EngineSequence, logits: Tensor, lead: float | None) -> bool:
    """Whether the first token [V] of a fused prompt is too close to its second choice to be taken
    from fused KV."""
    part = sequence.request.fused
    if part is None or not part.close_call:
        return False
    if lead is None:
        first, second = logits.topk(2).values.tolist()
        lead = first - second
    return bool(lead < part.close_call)


def _told(error: BaseException | None) -> BaseException | None:
    """What the reader of an answer hears: want of memory by its name, the rest as it is."""
    if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
        return error
    told = NoDeviceMemory(
        "the device has no memory left for this request; try again later, or send less text"
    )
    told.__cause__ = error
    return told


def _sampler(request: EngineRequest) -> Sampler:
    constraint = None if request.constraint is None else request.constraint()
    return Sampler(request.sampling, constraint)
