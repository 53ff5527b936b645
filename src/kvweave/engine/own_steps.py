"""Steps that a fused prompt takes by itself, one behind the other and, on a device, overlapping.

    host    C: scores │ a common step │ B's token │ C: choose, pass │ tokens │ D: scores ..
    device         B's pass           │ C: scores │ the common step │         C's pass     ..

A pass over shared chunks is ordered and not waited for. While the device is at it the next prompt
gets as far as having its rows scored, and a common step of all others is ordered; then the first
token is handed out. Taken one after the other they leave a device idle for nearly a quarter of the
time (`bench/gpu/idle.py`): while rows are chosen, tokens handed out and the next one prepared.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from kvweave.engine.fused_prompts import FusedPrompts, OrderedPrompt, word_for_pass
from kvweave.engine.lifecycle import Lifecycle
from kvweave.engine.page_manager import RoomLost
from kvweave.engine.runner import Runner, StepOutput
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import EngineSequence, is_plainly_greedy
from kvweave.fuse.prefill import Prefilled
from kvweave.fuse.protocol import Meanwhile


@dataclass(eq=False)
class OwnSteps:
    """Takes the own steps of fused prompts, and knows what was ordered from the device and is not
    waited for yet. For the engine thread; `has_prompt` and `num_steps` are read by any."""

    _scheduler: Scheduler[EngineSequence]
    _runner: Runner
    _lifecycle: Lifecycle
    _fused: FusedPrompts
    # that are computed between two common steps while prompts wait; 0: what is ordered is waited
    # for, and nothing overlaps
    _prompts_per_step: int
    _prompt: OrderedPrompt | None = None
    _step: Callable[[], StepOutput] | None = None
    _prompts_since: int = 0  # the last common step
    num_steps: int = 0  # common ones that were ordered between prompts

    @property
    def has_prompt(self) -> bool:
        """Whether a prompt is ordered whose first token is not handed out."""
        return self._prompt is not None

    def take(self, own: EngineSequence) -> None:
        """Take the own step of a fused request, overlapping the prompt before it where it can.

        One that cannot overlap takes its step behind that prompt's token, which would wait for it
        otherwise.
        """
        if not self._can_overlap(own):
            self.finish_prompt()
            self._take(own, None)
            return
        if self._prompt is not None:
            _mark_shared(own, self._prompt.sequence)
        self._prompts_since += 1
        ordered = self._take(
            own, Meanwhile(partial(self._work_while_scoring, own), self.finish_step)
        )
        self.finish_prompt()  # the one before, if this one failed before its rows were scored
        self._prompt = ordered

    def finish_step(self) -> None:
        """Hand out the results of the common step that was ordered, if there is one. No news is
        taken in between the two, so all its sequences are still there."""
        finish, self._step = self._step, None
        if finish is not None:
            self._lifecycle.finish_step(finish())

    def finish_prompt(self) -> None:
        """Hand out the first token of the prompt that was ordered, if there is one."""
        ordered, self._prompt = self._prompt, None
        if ordered is not None:
            self._finish(ordered)

    def _finish(self, ordered: OrderedPrompt) -> None:
        """Wait for the pass of an ordered prompt and end its step; end the request if the device
        failed."""
        sequence = ordered.sequence
        if not self._lifecycle.is_alive(sequence):
            return  # it has ended meanwhile, and given back what it held
        try:
            prefilled = ordered.prefill.finish()
        except Exception as error:  # the device's
            self._lifecycle.end(sequence.ticket, error)
            return
        self._end_step(sequence, prefilled, ordered.started_s)

    def count_common_step(self) -> None:
        """Note that a common step was taken by itself: prompts are counted from here again."""
        self._prompts_since = 0

    def forget(self) -> None:
        """Forget what was ordered, because all requests have ended."""
        self._prompt = self._step = None

    def _can_overlap(self, own: EngineSequence) -> bool:
        """Whether a prompt may be ordered while the device computes another: somebody waits for it,
        and the host waits only for the scores of its rows."""
        if not self._prompts_per_step or own.progress.held or own.progress.background:
            return False
        return self._fused.waits_only_for_scores(own)

    def _take(self, own: EngineSequence, meanwhile: Meanwhile | None) -> OrderedPrompt | None:
        """Lay out a prompt: its rows join the common steps, or are all computed now.

        With `meanwhile` the ordered prompt is returned and not waited for. What `meanwhile` does
        may end other requests, but must leave this one alone.
        """
        started_s = time.perf_counter()
        self._lifecycle.counts.add("fused_begun")
        is_first = own.progress.known == own.prompt_len  # else it was preempted while it answered
        try:
            is_alone = self._scheduler.is_alone(own)
            ordered = self._fused.begin(own, started_s, is_alone=is_alone, meanwhile=meanwhile)
            if ordered is not None and meanwhile is not None and is_first:
                own.finish_prompt()  # it has nothing more to compute
                return ordered
            prefilled = None if ordered is None else ordered.prefill.finish()
        except RoomLost:
            own.copies = True
            self._scheduler.begin_again(own)
        except Exception as error:  # this request's, and no other's
            self._lifecycle.end(own.ticket, error)
        else:
            self._end_step(own, prefilled, started_s)
        return None

    def _end_step(self, own: EngineSequence, prefilled: Prefilled | None, started_s: float) -> None:
        """Record the own step of a prompt, and answer if the prompt is `prefilled`. None: its rows
        were chosen and will run in the common steps."""
        lifecycle, seconds = self._lifecycle, time.perf_counter() - started_s
        own.ticket.timeline.add_step(seconds)
        if own.shared is not None:
            lifecycle.counts.add("fused_shared")
        if prefilled is None:
            own.apart_s += seconds
            lifecycle.offer_to_tree(own)
            return
        way = word_for_pass(own)
        own.fuse_record = replace(prefilled.record, way=way)
        own.finish_prompt()
        lifecycle.counts.add(f"fused_{way}")
        if own.ticket.record is None:
            own.ticket.record = own.fuse_record
        if own.progress.known == own.prompt_len:  # else it was preempted while it answered
            first, likeliest = prefilled.first, None
            if first is not None and is_plainly_greedy([own]):
                likeliest = first.token_id
            lead = None if first is None else first.lead
            lifecycle.draw_first(own, prefilled.logits, likeliest, lead)
        else:
            lifecycle.offer_to_tree(own)

    def _work_while_scoring(self, own: EngineSequence) -> None:
        """Use the time in which the device scores the rows of `own`: hand out the first token of
        the prompt before it, and order a common step."""
        if self._prompt is not None and self._prompt.prefill.is_through:
            self.finish_prompt()  # then it is in the step
        if self._step is None:  # else `own` tries again, without a chunk that was lost
            self._order_step(own)
        self.finish_prompt()

    def _order_step(self, own: EngineSequence) -> None:
        """Order a common step of all requests but `own` and the prompt that was ordered before it.

        Orders none if a token would have to be drawn from logits, or if another fused prompt should
        come first.
        """
        apart = [own] if self._prompt is None else [own, self._prompt.sequence]
        others = [one for one in self._scheduler.running if one not in apart]
        # a token that is drawn from logits would be drawn behind the whole pass
        if not is_plainly_greedy(others):
            return
        if self._prompts_since < self._prompts_per_step and self._scheduler.let_in_beside(apart):
            return
        if slices := self._scheduler.step_beside(apart):
            self._step = self._runner.order(slices)
            _mark_shared(own)
            self.num_steps += 1
        self._prompts_since = 0


def _mark_shared(*prompts: EngineSequence) -> None:
    """Mark these prompts as having shared the device: their times are not those of prompts that run
    alone."""
    for one in prompts:
        one.ticket.timeline.shared = True
