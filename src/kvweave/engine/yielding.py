"""A step that nobody waits for gives way between two layers: to what is more urgent, or when it is
not wanted any more.

Guesses: on a GPU a prompt is computed fastest in one step, and a step of a long one takes longer
than anyone should wait for a guess. Idle time: on a CPU even a short step takes long. What such a
step has computed is lost; its sequences stand where they stood before it.

Orders to a device run ahead of it, and what was ordered is computed in any case: such a step stays
close to its device.
"""

from collections import deque
from collections.abc import Callable
from enum import IntEnum

import torch

from kvweave.engine.request import Ticket

AHEAD = 2  # layers that are ordered and not computed yet


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


class StepGivenUp(Exception):
    """A step was stopped: nothing came of it, and nothing has changed."""


class YieldingStep:
    """One step that may stop between two layers. For the engine thread."""

    def __init__(self, device: torch.device, is_wanted: Callable[[], bool]) -> None:
        """`is_wanted` is asked at every layer."""
        self._is_wanted = is_wanted
        self._on_gpu = device.type == "cuda"
        self._ordered: deque[torch.cuda.Event] = deque()

    def reach_layer(self) -> None:
        """Note that a layer was ordered. Raises StepGivenUp if the step should stop here."""
        if self._on_gpu:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self._ordered.append(done)
            if len(self._ordered) > AHEAD:
                self._ordered.popleft().synchronize()
        if not self._is_wanted():
            raise StepGivenUp
