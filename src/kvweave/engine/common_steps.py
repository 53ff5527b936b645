"""Steps that many requests take together: one forward pass, tokens for those that are through.

A step that nobody waits for may stop between two layers: when a message makes something more urgent
or when the step is not wanted any more.

Guesses: on a GPU a prompt is computed fastest in one step, and a step of a long one takes longer
than anyone should wait for a guess. Idle time: on a CPU even a short step takes long. What such a
step has computed is lost; its sequences stand where they stood before it.

Orders to a device run ahead of it, and what was ordered is computed in any case: such a step stays
close to its device.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from kvweave.engine.chunk_loader import LoadedPrompt
from kvweave.engine.inbox import Inbox
from kvweave.engine.lifecycle import Lifecycle, Message
from kvweave.engine.offload import ArrivedCopy
from kvweave.engine.request import Ticket
from kvweave.engine.runner import Runner, SequenceSlice, StepGivenUp
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import EngineSequence

AHEAD = 2  # layers of a step that may stop which are ordered and not computed yet


class Urgency(IntEnum):
    """Why a request is computed now."""

    IDLE_TIME = 0
    GUESSED = 1
    AWAITED = 2  # somebody waits for it


def urgency(ticket: Ticket) -> Urgency:
    """Return why a request is computed now. A guess that turns out right is awaited from then on.
    Any thread."""
    if ticket.request.background:
        return Urgency.IDLE_TIME
    return Urgency.GUESSED if ticket.is_held else Urgency.AWAITED


def is_more_urgent(message: Message, own: Urgency) -> bool:
    """Whether what the engine would do next because of a message is more urgent than `own`."""
    match message:
        case Ticket():
            return not (message.is_cancelled or message.is_done) and urgency(message) > own
        case LoadedPrompt():
            return urgency(message.sequence.ticket) > own
        case ArrivedCopy():
            return False
        case _:  # a job: a request may wait for it, and then again it may be of idle time itself
            return own is Urgency.GUESSED


@dataclass(eq=False)
class CommonSteps:
    """Takes common steps. For the engine thread; any thread reads `num_given_up`."""

    _inbox: Inbox[Message]
    _scheduler: Scheduler[EngineSequence]
    _runner: Runner
    _lifecycle: Lifecycle
    # of a step that runs, if it may stop between two layers
    _tickets: list[Ticket] = field(default_factory=list)
    # its layers, as far as a GPU is behind
    _ordered: deque[torch.cuda.Event] = field(default_factory=deque)
    num_given_up: int = 0  # steps

    def take(self, slices: Sequence[SequenceSlice]) -> None:
        """Compute a step and hand out what it gave, if it is not given up."""
        may_stop = self._scheduler.may_stop(slices)
        if may_stop:
            self._tickets = [each.sequence.ticket for each in slices]
        try:
            output = self._runner.run(slices, may_record=not may_stop)
        except StepGivenUp:
            self.num_given_up += 1
            for each in slices:
                each.sequence.progress.given_up += 1
            return
        finally:
            self._tickets = []
            self._ordered.clear()
        self._lifecycle.finish_step(output)

    def reach_layer(self) -> None:
        """Note that a layer was ordered. Raises StepGivenUp if the step that runs should stop
        here."""
        if not self._tickets:
            return
        if self._runner.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self._ordered.append(done)
            if len(self._ordered) > AHEAD:
                self._ordered.popleft().synchronize()
        if not self._is_wanted():
            raise StepGivenUp

    def _is_wanted(self) -> bool:
        """Whether a step that may stop should go on: one of its guesses turned out right, or
        nothing more urgent was posted."""
        if self._inbox.is_closed:
            return False
        if not self._inbox:
            return True
        own = max(map(urgency, self._tickets))
        if own is Urgency.AWAITED:
            return True
        if all(ticket.is_cancelled for ticket in self._tickets):
            return False
        return not any(is_more_urgent(message, own) for message in self._inbox.peek())
