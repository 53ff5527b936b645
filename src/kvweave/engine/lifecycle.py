"""The life of a request: it begins, loads, is computed, answers and ends. On the engine thread.

Ticket ─► sequence ─► (LoadedPrompt) ─► scheduler ─► steps ─► logits ─► tokens ─► end
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvweave.engine.arrivals import Arrivals
from kvweave.engine.chunk_loader import ChunkLoader, LoadedPrompt
from kvweave.engine.drafts import Drafts
from kvweave.engine.drawing import TokenDrawer
from kvweave.engine.offload import ArrivedCopy
from kvweave.engine.page_manager import PageManager
from kvweave.engine.prefixes import ExactPrefixes
from kvweave.engine.request import Ticket
from kvweave.engine.runner import SliceResult, StepOutput
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import EngineSequence
from kvweave.engine.stats import EngineCounts, exact_record, joined_record
from kvweave.engine.warm_up import WarmUp
from kvweave.errors import NoDeviceMemory
from kvweave.fuse.record import JOINED
from kvweave.kernels.recording import is_out_of_memory, num_first_times

# What other threads post to the engine thread: a ticket that is new, released or cancelled, the end
# of a load or of a copy to host memory, or a job to run between two steps
Message = Ticket | LoadedPrompt | ArrivedCopy | Callable[[], None]


@dataclass(eq=False)
class Lifecycle:
    """Knows every request that has not ended, and takes back all that a request holds when it ends.

    The engine thread owns it; any thread reads `sequences` and `counts`.
    """

    _arrivals: Arrivals
    _scheduler: Scheduler[EngineSequence]
    _pages: PageManager
    _prefixes: ExactPrefixes
    _loader: ChunkLoader
    _warm_up: WarmUp
    _copy_tokens: int  # of an answer are drafted at a time at most: see drafts.py
    sequences: dict[Ticket, EngineSequence] = field(default_factory=dict)
    counts: EngineCounts = field(default_factory=EngineCounts)
    failed_in_row: int = 0  # requests that failed since the last token was drawn

    def __post_init__(self) -> None:
        self._drafts = Drafts(self._copy_tokens)
        self._first_times = num_first_times()
        self._drawer = TokenDrawer(self._scheduler, self._pages, self.counts, self._drafts)

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, no load or copy that is still under way, and no warm-up left
        to do."""
        under_way = self._loader.is_loading or self._prefixes.is_offloading
        return not (self.sequences or under_way) and self._warm_up.due_s is None

    @property
    def idle_work_due_s(self) -> float | None:
        """Return the seconds until the next step of the warm-up, if no message comes; None if there
        is a request or no such step."""
        return None if self.sequences else self._warm_up.due_s

    def do_idle_work(self) -> bool:
        """Use a moment without any request: compile a kernel or record a step ahead of its use, or
        else copy exact KV to host memory before it leaves the pool. Returns whether to call again
        at once."""
        if self.sequences:
            return False
        if self._warm_up.step():
            return True
        self._prefixes.replicate_some()
        return False

    def is_alive(self, sequence: EngineSequence) -> bool:
        """Whether a request has not ended."""
        return self.sequences.get(sequence.ticket) is sequence

    def handle(self, message: Message) -> None:
        """Act on what another thread posted to the engine thread."""
        match message:
            case Ticket():
                self._update_ticket(message)
            case LoadedPrompt():
                self._finish_loading(message)
            case ArrivedCopy():
                self._prefixes.settle(message)
            case job:
                self._warm_up.note_job()
                job()

    def _update_ticket(self, ticket: Ticket) -> None:
        """Begin a ticket that is new, end one that was cancelled, or let one answer that was held
        back and is released."""
        sequence = self.sequences.get(ticket)
        if ticket.is_cancelled:
            self.end(ticket)
        elif sequence is not None:
            self._let_answer(sequence)
        elif not ticket.is_done:
            sequence = self._arrivals.begin(ticket)
            self.sequences[ticket] = sequence
            self._scheduler.add(sequence)

    def _finish_loading(self, loaded: LoadedPrompt) -> None:
        """Let a request wait for its turn, because its bytes have come; end it if loading failed,
        and close the bytes of one that was cancelled meanwhile."""
        sequence, result, started_s = loaded
        sequence.ticket.timeline.loading_s += time.perf_counter() - started_s
        if isinstance(result, BaseException):
            self.end(sequence.ticket, result)
        elif not self.is_alive(sequence):
            result.close()
        else:
            sequence.stored = result
            self._scheduler.add(sequence)

    def _let_answer(self, sequence: EngineSequence) -> None:
        """Make a held request an ordinary one, and count it as a right guess. If its prompt is
        computed already, draw its first token from the logits that were kept."""
        if sequence.progress.held:
            self.counts.count_right_guess(sequence)
        logits, sequence.logits = sequence.logits, None
        self._scheduler.release(sequence)
        if logits is not None:
            self.draw_first(sequence, logits, None)

    def finish_step(self, output: StepOutput) -> None:
        """Take in what a common step computed: rows, and logits of the requests that are through
        with theirs."""
        all_rows = sum(result.slice.num_rows for result in output.results)
        before, self._first_times = self._first_times, num_first_times()
        is_usual = before == self._first_times  # else it took what no step will take again
        if is_usual and all(result.slice.sequence.progress.decodes for result in output.results):
            self._drafts.observe_step(all_rows, output.seconds)
        for result in output.results:
            self._finish_slice(result, output.seconds, all_rows)
        self._drawer.share_out_drafts([result.slice.sequence for result in output.results])

    def _finish_slice(self, result: SliceResult, seconds: float, all_rows: int) -> None:
        """Advance one request by its rows of a step, which had `all_rows` and took `seconds`, and
        draw a token if the step gave it logits."""
        sequence, num_rows = result.slice
        if result.error is not None:
            self.end(sequence.ticket, result.error)
            return
        was_sparse = sequence.progress.sparse is not None
        sequence.progress.advance(num_rows)
        if was_sparse and sequence.progress.sparse is None:
            self.counts.add(f"fused_{JOINED}")
        sequence.ticket.timeline.add_step(seconds, num_rows / all_rows)
        if result.logits is None:
            self.offer_to_tree(sequence)
            return
        if sequence.ticket.record is None:
            is_fused = sequence.request.fused is not None
            sequence.ticket.record = (joined_record if is_fused else exact_record)(sequence)
        self.draw_tokens(sequence, result.logits, result.likeliest)

    def offer_to_tree(self, sequence: EngineSequence) -> None:
        """Offer the knowledge tree the parts of a prompt that are computed exactly by now."""
        num_taken = self._pages.offer(sequence)
        if sequence.request.fused is not None:
            self.counts.add("fused_offered", num_taken)

    def draw_first(
        self,
        sequence: EngineSequence,
        logits: Tensor,
        likeliest: int | None,
        lead: float | None = None,
    ) -> None:
        """Draw the first token of a prompt that no common step computed, from its logits [V]; what
        it drafts is chosen for itself."""
        self.draw_tokens(sequence, logits[None], [likeliest], lead)
        self._drawer.share_out_drafts([sequence])

    def draw_tokens(
        self,
        sequence: EngineSequence,
        logits: Tensor,
        likeliest: Sequence[int | None],
        lead: float | None = None,
    ) -> None:
        """Draw the next tokens of a request from its logits [W, V], as `TokenDrawer.draw` does.
        Then offer the tree what is computed of its prompt, which the first token need not wait for,
        and end the request if a token was the last or could not be drawn."""
        answered = sequence.answered
        try:
            is_over = self._drawer.draw(sequence, logits, likeliest, lead)
        except Exception as error:  # the device's, or logits that are no numbers: this request's
            self.end(sequence.ticket, error)
            return
        if sequence.answered > answered:
            self.failed_in_row = 0
        self.offer_to_tree(sequence)
        if is_over:
            self.end(sequence.ticket)

    def end(self, ticket: Ticket, error: BaseException | None = None) -> None:
        """End a request that is finished, cancelled or failed with `error`: give back all that it
        holds, count it, and tell its reader. A ticket that never began has only a reader."""
        error = _error_for_reader(error)
        sequence = self.sequences.pop(ticket, None)
        self._warm_up.note_request_ended()
        try:
            if sequence is not None:
                self._give_back(sequence)
                how = "failed" if error else "aborted" if ticket.is_cancelled else "finished"
                whose = "background" if ticket.request.background else "requests"
                self.counts.add(f"{whose}_{how}")
                self.failed_in_row += how == "failed"
        finally:  # whatever is wrong with the books, its reader must not wait for ever
            ticket.end(error)

    def _give_back(self, sequence: EngineSequence) -> None:
        """Remove a request from the scheduler, and free its stored bytes and its pages. One that is
        still held counts as a wrong guess."""
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
    refusal = NoDeviceMemory(
        "the device has no memory left for this request; try again later, or send less text"
    )
    refusal.__cause__ = error
    return refusal
