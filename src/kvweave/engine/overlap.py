"""Fused prompts one behind the other, and common steps between them, without a pause of the device.

    host    C: scores │ a common step │ B's token │ C: choose, pass │ tokens │ D: scores ..
    device         B's pass           │ C: scores │ the common step │         C's pass     ..

A pass over shared chunks is ordered and not waited for. While the device is at it the next prompt
gets as far as having its rows scored, and a common step of all others is ordered; then the first
token is handed out. Taken one after the other they leave a device idle for nearly a quarter of the
time (`bench/gpu/idle.py`): while rows are chosen, tokens handed out and the next one prepared.
"""

from collections.abc import Callable
from functools import partial

from kvweave.engine.fused_step import is_scored
from kvweave.engine.lifecycle import Lifecycle, OrderedPrompt
from kvweave.engine.runner import Runner, StepOutput
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import EngineSequence, is_plainly_greedy
from kvweave.fuse.protocol import Meanwhile


class Overlap:
    """What the device was told and the host has not waited for. For the engine thread; `has_prompt`
    and `num_steps` are read by any."""

    def __init__(
        self,
        scheduler: Scheduler[EngineSequence],
        runner: Runner,
        lifecycle: Lifecycle,
        prompts_per_step: int,
    ) -> None:
        """While prompts wait, so many are computed between two common steps."""
        self._scheduler = scheduler
        self._runner = runner
        self._lifecycle = lifecycle
        self._prompt: OrderedPrompt | None = None
        self._step: Callable[[], StepOutput] | None = None
        self._prompts_per_step = prompts_per_step
        self._prompts_since = 0  # the last common step
        self.num_steps = 0  # common ones that were ordered between prompts

    @property
    def has_prompt(self) -> bool:
        """Whether a prompt is ordered whose first token is not handed out."""
        return self._prompt is not None

    def take_own_step(self, own: EngineSequence) -> None:
        """As the lifecycle's. One that nobody waits for, that waits for bytes itself or has no rows
        scored would keep the token of the prompt before it waiting, and does not overlap it."""
        progress = own.progress
        if progress.held or progress.background or not is_scored(own):
            self.finish_prompt()
            self._lifecycle.take_own_step(own)
            return
        if self._prompt is not None:
            _are_together(own, self._prompt.sequence)
        self._prompts_since += 1
        meanwhile = Meanwhile(partial(self._scoring, own), self.finish_step)
        ordered = self._lifecycle.take_own_step(own, meanwhile)
        self.finish_prompt()  # the one before, if this one failed before its rows were scored
        self._prompt = ordered

    def finish_step(self) -> None:
        """Hand out the common step that was ordered, if that is still to be done. Nothing is heard
        of between the two: its sequences are all there."""
        finish, self._step = self._step, None
        if finish is not None:
            self._lifecycle.hand_out(finish())

    def finish_prompt(self) -> None:
        """Hand out the first token of the prompt that was ordered, if that is still to be done."""
        ordered, self._prompt = self._prompt, None
        if ordered is not None:
            self._lifecycle.finish_own_step(ordered)

    def took_step(self) -> None:
        """A common step was taken by itself."""
        self._prompts_since = 0

    def forget(self) -> None:
        """All requests have ended."""
        self._prompt = self._step = None

    def _scoring(self, own: EngineSequence) -> None:
        """Rows of `own` are being scored: the device has that to do, and what it had before."""
        if self._prompt is not None and self._prompt.prefill.is_through:
            self.finish_prompt()  # then it is in the step
        if self._step is None:  # else `own` tries again, without a chunk that was lost
            self._order_step(own)
        self.finish_prompt()

    def _order_step(self, own: EngineSequence) -> None:
        apart = [own] if self._prompt is None else [own, self._prompt.sequence]
        others = [one for one in self._scheduler.running if one not in apart]
        # a token that is drawn from logits would be drawn behind the whole pass
        if not is_plainly_greedy(others):
            return
        if self._prompts_since < self._prompts_per_step and self._scheduler.let_in_beside(apart):
            return
        if slices := self._scheduler.step_beside(apart):
            self._step = self._runner.order(slices)
            _are_together(own)
            self.num_steps += 1
        self._prompts_since = 0


def _are_together(*prompts: EngineSequence) -> None:
    """What these take is not what they take alone."""
    for one in prompts:
        one.ticket.timeline.shared = True
