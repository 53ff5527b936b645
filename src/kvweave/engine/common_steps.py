"""Steps that many requests take together: one forward pass, tokens for those that are through.

A step that nobody waits for gives way between two layers (yielding.py).
"""

from collections.abc import Sequence
from functools import partial

from kvweave.engine.inbox import Inbox
from kvweave.engine.lifecycle import Lifecycle
from kvweave.engine.news import News, comes_before
from kvweave.engine.request import Ticket
from kvweave.engine.runner import Runner, SequenceSlice
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import EngineSequence
from kvweave.engine.yielding import StepGivenUp, Urgency, YieldingStep, urgency


class CommonSteps:
    """Takes common steps. For the engine thread; any thread reads `num_given_up`."""

    def __init__(
        self,
        inbox: Inbox[News],
        scheduler: Scheduler[EngineSequence],
        runner: Runner,
        lifecycle: Lifecycle,
    ) -> None:
        self._inbox = inbox
        self._scheduler = scheduler
        self._runner = runner
        self._lifecycle = lifecycle
        self._yielding: YieldingStep | None = None  # set while one runs
        self.num_given_up = 0  # steps

    def take(self, slices: Sequence[SequenceSlice]) -> None:
        """Compute a step and hand out what it gave, if it is not given up."""
        sequences = [each.sequence for each in slices]
        gives_way = self._scheduler.gives_way(slices)
        if gives_way:
            is_wanted = partial(self._is_wanted, [each.ticket for each in sequences])
            self._yielding = YieldingStep(self._runner.device, is_wanted)
        try:
            output = self._runner.run(slices, may_record=not gives_way)
        except StepGivenUp:
            self.num_given_up += 1
            for each in sequences:
                each.progress.given_up += 1
            return
        finally:
            self._yielding = None
        self._lifecycle.hand_out(output)

    def reach_layer(self) -> None:
        """Note that a layer was computed. Raises StepGivenUp if the step that runs should stop
        here."""
        if self._yielding is not None:
            self._yielding.reach_layer()

    def _is_wanted(self, tickets: Sequence[Ticket]) -> bool:
        """Whether a step of guesses or of idle time should go on: one of its guesses turned out
        right, or nothing more urgent was posted."""
        if self._inbox.is_closed:
            return False
        if not self._inbox:
            return True
        own = max(map(urgency, tickets))
        if own is Urgency.AWAITED:
            return True
        if all(ticket.is_cancelled for ticket in tickets):
            return False
        return not any(comes_before(news, own) for news in self._inbox.peek())
