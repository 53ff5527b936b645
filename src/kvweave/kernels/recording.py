"""What happens once on a GPU: kernels are compiled, steps recorded as CUDA graphs. And when such a
recording fails: what is given up, and for how long.

Want of memory says something about one size at one moment: that size is left alone for a while and
tried again. Any other failure (an operation that cannot be recorded, a kernel that does not
compile) would come back with every size, each time as late: that kind of recording is over.
In both cases nothing is lost but time: what is not recorded is computed by the plain calls.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")
_first_times: list[str] = []  # what was done
PAUSE = 1024  # wishes for a size that had no memory, before it is tried again


def note_first_time(what: str) -> None:
    """Note that something is done which takes longer than it ever will again: a kernel is launched
    with arguments of a new sort and perhaps compiled, a step is computed that will be recorded, or
    is recorded."""
    _first_times.append(what)


def num_first_times() -> int:
    """How often that was so far. Any thread."""
    return len(_first_times)


class Refusals:
    """Refusals of one kind of recording. Written by the thread that owns the device, read by
    any."""

    def __init__(self, what: str, cost: str) -> None:
        """What cannot be recorded then, and what that costs: the words of a log line."""
        self._what = what
        self._cost = cost
        self._pauses: dict[int, int] = {}  # rows of a size to wishes that are still turned down
        self.num_tried = 0  # recordings that were begun
        self.num_failed = 0  # of these, for good: one ends them all
        self.num_without_memory = 0

    def may_record(self, num_rows: int) -> bool:
        """Whether a size that is wished for should be tried now. Counts the wish."""
        if self.num_failed:
            return False
        left = self._pauses.get(num_rows, 0)
        if left:
            self._pauses[num_rows] = left - 1
            return False
        self.num_tried += 1
        note_first_time(self._what)
        return True

    def is_paused(self, num_rows: int) -> bool:
        """Whether a size would be turned down now. Counts no wish."""
        return bool(self.num_failed or self._pauses.get(num_rows, 0))

    def attempt(self, num_rows: int, record: Callable[[], T]) -> T | None:
        """What `record` makes. None: it failed, or this size is not to be tried now."""
        if not self.may_record(num_rows):
            return None
        try:
            return record()
        except RuntimeError as error:  # torch's word for every CUDA error
            self.note_failure(num_rows, error)
            return None

    def note_failure(self, num_rows: int, error: Exception) -> None:
        """Note that recording this size failed, and log it in one line: once for a size, once for
        the kind."""
        reason = str(error).partition("\n")[0]
        if not is_out_of_memory(error):
            self.num_failed += 1
            log.warning("%s cannot be recorded (%s): %s", self._what, reason, self._cost)
            return
        self.num_without_memory += 1
        if num_rows not in self._pauses:
            log.warning(
                "%s of %d rows cannot be recorded for want of memory (%s): %s, and it is tried "
                "again later",
                self._what,
                num_rows,
                reason,
                self._cost,
            )
        self._pauses[num_rows] = PAUSE


def count_refusals(refusals: Sequence[Refusals]) -> dict[str, int]:
    """Sum up the refusals of all kinds, for the engine's stats. Any thread."""
    return {
        "recordings_failed": sum(each.num_failed for each in refusals),
        "recordings_without_memory": sum(each.num_without_memory for each in refusals),
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is for want of device memory, or came while such a one was handled: ending
    a recording that failed can fail as well."""
    return any(_wants_memory(each) for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _wants_memory(error: BaseException) -> bool:
    words = str(error)
    return (
        isinstance(error, torch.cuda.OutOfMemoryError)
        or "out of memory" in words  # the driver's own error
        or "ALLOC_FAILED" in words  # the vendor's libraries
    )
