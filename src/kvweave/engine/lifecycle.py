"""The life of a request: it begins, loads, is computed, answers and ends. On the engine thread."""

import logging
import time
from dataclasses import replace

from torch import Tensor

from kvweave.engine.arrivals import Arrivals
from kvweave.engine.chunk_loader import ChunkLoader, LoadedPrompt
from kvweave.engine.news import News
from kvweave.engine.offload import ArrivedCopy
from kvweave.engine.page_manager import PageManager
from kvweave.engine.prefixes import ExactPrefixes
from kvweave.engine.request import Ticket
from kvweave.engine.runner import SliceResult, StepOutput
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import EngineSequence, is_close_call
from kvweave.engine.stats import EngineCounts, exact_record, joined_record
from kvweave.engine.warm_up import WarmUp
from kvweave.errors import NoDeviceMemory, NoNumbers
from kvweave.fuse.record import JOINED
from kvweave.kernels.recording import is_out_of_memory

log = logging.getLogger(__name__)


class Lifecycle:
    """Knows every request that has not ended, and takes back all that a request holds when it ends.

    The engine thread owns it; any thread reads `sequences` and `counts`.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        scheduler: Scheduler[EngineSequence],
        pages: PageManager,
        prefixes: ExactPrefixes,
        loader: ChunkLoader,
        warm_up: WarmUp,
    ) -> None:
        self._arrivals = arrivals
        self._warm_up = warm_up
        self._scheduler = scheduler
        self._pages = pages
        self._prefixes = prefixes
        self._loader = loader
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
        """Do something useful in idle time: compile kernels, record steps ahead of their use, or
        copy exact KV ahead of its leaving the pool. Does nothing while there is a request. False:
        there is nothing more to do at once."""
        if self.sequences:
            return False
        if self._warm_up.step():
            return True
        self._prefixes.replicate_some()
        return False

    def has(self, sequence: EngineSequence) -> bool:
        """Whether a request is still known here, because it has not ended."""
        return self.sequences.get(sequence.ticket) is sequence

    def hear(self, news: News) -> None:
        """Act on what another thread posted to the engine thread."""
        match news:
            case Ticket():
                self._update_ticket(news)
            case LoadedPrompt():
                self._finish_loading(news)
            case ArrivedCopy():
                self._prefixes.settle(news)
            case job:
                job()

    def _update_ticket(self, ticket: Ticket) -> None:
        """Begin a ticket that is new; release or end one whose owner released or cancelled it."""
        sequence = self.sequences.get(ticket)
        if ticket.is_cancelled:
            self.end(ticket)
        elif sequence is not None:
            self._release(sequence)
        elif not ticket.is_done:
            sequence = self._arrivals.begin(ticket)
            self.sequences[ticket] = sequence
            self._scheduler.add(sequence)

    def _finish_loading(self, loaded: LoadedPrompt) -> None:
        """Let a request wait for its turn now that its bytes have come, or end it if they will
        never come."""
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
        """Let a held request answer: from the logits that it kept, if its prompt is computed."""
        if sequence.progress.held:
            self.counts.count_right_guess(sequence)
        logits, sequence.logits = sequence.logits, None
        self._scheduler.release(sequence)
        if logits is not None:
            self.answer(sequence, logits)

    def hand_out(self, output: StepOutput) -> None:
        """Give every request the rows and logits that a common step computed for it."""
        shared = len(output.results) > 1
        for result in output.results:
            self._hand_out_slice(result, output.seconds, shared)

    def _hand_out_slice(self, result: SliceResult, seconds: float, shared: bool) -> None:
        """Advance one request by the rows that a step of `seconds` computed of it, and answer if
        the step gave it logits. `shared`: others took part in the step."""
        sequence, num_rows = result.slice
        if result.error is not None:
            self.end(sequence.ticket, result.error)
            return
        was_sparse = sequence.progress.sparse is not None
        sequence.progress.advance(num_rows)
        if was_sparse and sequence.progress.sparse is None:
            self.counts.add(f"fused_{JOINED}")
        self.offer(sequence)
        sequence.ticket.timeline.add_step(seconds, shared)
        if result.logits is None:
            return
        if sequence.ticket.record is None:
            is_fused = sequence.request.fused is not None
            sequence.ticket.record = (joined_record if is_fused else exact_record)(sequence)
        self.answer(sequence, result.logits, result.likeliest)

    def offer(self, sequence: EngineSequence) -> None:
        """Offer the knowledge tree the exact part of a prompt that was computed further."""
        taken = self._pages.offer(sequence)
        if sequence.request.fused is not None:
            self.counts.add("fused_offered", taken)

    def answer(
        self,
        sequence: EngineSequence,
        logits: Tensor,
        likeliest: int | None = None,
        lead: float | None = None,
    ) -> None:
        """Draw a token and hand it out; a held request keeps the logits instead.

        `likeliest` is the most likely token if it is known and nothing else matters; `lead` is how
        far its logit is ahead of the next one, if that is known.
        """
        in_background = sequence.progress.background
        try:
            if sequence.progress.held:
                sequence.hold_back(logits)
                return
            if not sequence.answered:
                if is_close_call(sequence, logits, lead):
                    self._compute_exactly(sequence)
                    return
                if not in_background:
                    self.counts.count_prompt(sequence)
            choice = sequence.choose(logits, likeliest)
        except Exception as error:  # the device's, or logits that are no numbers: this request's
            if isinstance(error, NoNumbers):
                self._drop_bad_pages(sequence)
            self.end(sequence.ticket, error)
            return
        self.failed_in_row = 0
        if not in_background:
            self.counts.add("tokens_answered")
        if sequence.take(choice):
            self.end(sequence.ticket)

    def _drop_bad_pages(self, sequence: EngineSequence) -> None:
        """Drop the pages that a failed request read if they hold values that are no numbers, so
        that the next request does not read them."""
        try:
            dropped = self._pages.drop_bad_pages(sequence)
        except RuntimeError as error:  # CUDA's: the request has an error to end with already
            log.warning("what an answer was computed from could not be looked at: %s", error)
            return
        if dropped:
            log.warning("KV on the device held what is no number: %d chunks or prefixes", dropped)
        self.counts.add("kv_distrusted", dropped)

    def _compute_exactly(self, sequence: EngineSequence) -> None:
        """Begin a fused prompt again as a prompt that is computed in full."""
        self.counts.add("fused_close_calls")
        sequence.request = replace(sequence.request, fused=None)
        sequence.fuse_record = sequence.ticket.record = None
        self._scheduler.begin_again(sequence)

    def end(self, ticket: Ticket, error: BaseException | None = None) -> None:
        """End a request that is finished, cancelled or failed with `error`: give back all that it
        holds, count it and tell its reader."""
        error = _error_for_reader(error)
        sequence = self.sequences.pop(ticket, None)
        self._warm_up.note_request_ended()
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
        """Take a request out of the scheduler and free its stored bytes and its pages."""
        if sequence.progress.held:
            self.counts.count_wrong_guess(sequence)
        self._scheduler.remove(sequence)
        if sequence.stored is not None:
            sequence.stored.close()
        self._pages.retire(sequence)


def _error_for_reader(error: BaseException | None) -> BaseException | None:
    """Return the error that the reader of an answer gets: NoDeviceMemory where the device ran out
    of memory, else `error` itself."""
    if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
        return error
    told = NoDeviceMemory(
        "the device has no memory left for this request; try again later, or send less text"
    )
    told.__cause__ = error
    return told
