"""A step of guesses alone gives way between two layers: to whoever comes, or when it is not wanted.

On a GPU a prompt is computed fastest in one step, and a step of a long one takes longer than anyone
should wait for a guess. What such a step has computed is lost; its sequences stand where they stood
before it.

Orders to a device run ahead of it, and what was ordered is computed in any case: such a step stays
close to its device.
"""

from collections import deque
from collections.abc import Callable

import torch

AHEAD = 2  # layers that are ordered and not computed yet


class StepGivenUp(Exception):
    """Nothing came of a step, and nothing has changed."""


class GuessStep:
    """One such step. For the engine thread."""

    def __init__(self, device: torch.device, is_wanted: Callable[[], bool]) -> None:
        """`is_wanted` is asked at every layer."""
        self._is_wanted = is_wanted
        self._on_gpu = device.type == "cuda"
        self._ordered: deque[torch.cuda.Event] = deque()

    def reached_layer(self) -> None:
        """Raises StepGivenUp if it is not to go on."""
        if self._on_gpu:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self._ordered.append(done)
            if len(self._ordered) > AHEAD:
                self._ordered.popleft().synchronize()
        if not self._is_wanted():
            raise StepGivenUp
