"""When work that can wait may have the engine: all of the time while no answer is in the making,
and else a share of it, so that a server which is never idle gets on with it as well.

    nobody asks                         all of the time
    answers are told                    `share` of it: who reads hardly notices
    somebody waits for a first token    `share * AWAITED`, because that is what people wait for

What is not used is saved up, to a bound: a prompt may be one long step, and behind it the engine is
had for as long as was saved. All background work over one engine goes through one `BackgroundPace`:
one piece at a time, whoever does it, and the share is that of all together.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

QUIET_S = 0.5  # without an answer: the next question of a conversation often comes at once
BUSY_SHARE = 0.3  # of the time, while answers are told; 0: none
AWAITED = 0.25  # of that share, while somebody waits for a first token
SLICE_S = 0.05  # the engine is had for so long at a time in idle time: a question may come
MOST_SAVED_S = 0.25  # and beside answers for what was saved up, so much at most
LEAST_S = 0.02  # shorter pieces are mostly overhead
LOOK_S = 0.2  # how often one who waits looks whether it is to end


class GaveUp(Exception):
    """What waited for its turn is no longer wanted."""


class BusySeconds(NamedTuple):
    """How long answers have been in the making so far."""

    awaited: float  # while somebody waited for a first token
    told: float  # while all had theirs


class AnswerInMaking:
    """One answer that is counted inside a `with`: awaited, until its first token is told."""

    def __init__(self, answers: "ActiveAnswers") -> None:
        self._answers = answers
        self._is_awaited = True

    def begin_telling(self) -> None:
        """Note that the first token is there. Harmless the second time."""
        if self._is_awaited:
            self._is_awaited = False
            self._answers.count(0, -1)

    def __enter__(self) -> Self:
        self._answers.count(1, 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.count(-1, -1 if self._is_awaited else 0)


class ActiveAnswers:
    """How many answers are in the making. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num = 0
        self._num_awaited = 0  # of these, without a first token
        self._ended_s = -math.inf  # when the last one did, by time.monotonic
        self._counted_s = 0.0  # up to when the next two are counted
        self._awaited_s = 0.0
        self._told_s = 0.0

    def one(self) -> AnswerInMaking:
        """An answer is in the making inside the `with`."""
        return AnswerInMaking(self)

    def count(self, num: int, num_awaited: int) -> None:
        """Note that so many answers more are in the making, and so many more are awaited."""
        with self._changed:
            self._pass_time()
            self._num += num
            self._num_awaited += num_awaited
            if num < 0:
                self._ended_s = time.monotonic()
            self._changed.notify_all()

    def is_awaited(self) -> bool:
        """Whether somebody waits for a first token."""
        return self._num_awaited > 0

    def busy_seconds(self) -> BusySeconds:
        """Return how long answers have been in the making until now. The moment behind an answer in
        which the next question may come counts as told."""
        with self._changed:
            self._pass_time()
            return BusySeconds(self._awaited_s, self._told_s)

    def _pass_time(self) -> None:
        """Lock is held. Add the time since the last call to what it was spent with."""
        now_s = time.monotonic()
        passed_s = now_s - self._counted_s
        if self._num_awaited:
            self._awaited_s += passed_s
        elif self._num:
            self._told_s += passed_s
        else:
            quiet_from_s = self._ended_s + QUIET_S
            self._told_s += max(0.0, min(now_s, quiet_from_s) - self._counted_s)
        self._counted_s = now_s

    def wait_for_quiet(self, quiet_s: float, timeout_s: float) -> bool:
        """Wait until there was none for so long. False: it takes longer."""
        give_up_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now_s = time.monotonic()
                left_s = quiet_s - (now_s - self._ended_s) if not self._num else math.inf
                if left_s <= 0:
                    return True
                if now_s >= give_up_s:
                    return False
                self._changed.wait(min(left_s, give_up_s - now_s))

    def wait_for_none(self, timeout_s: float) -> bool:
        """Wait until there is none. False: there still is one."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num == 0, timeout_s)


class BackgroundPace:
    """Says when background work may have the engine. Any thread."""

    def __init__(self, answers: ActiveAnswers, share: float = BUSY_SHARE) -> None:
        """`share` of the time is taken while answers are told."""
        self.share = share
        self._answers = answers
        self._one = threading.Lock()  # held for a piece of work, which alone uses the next two
        self._saved_s = 0.0  # that the engine may be had for beside answers; less than 0: owed
        self._counted = answers.busy_seconds()  # up to where that is counted

    @contextmanager
    def turn(
        self,
        ended: threading.Event,
        idle_only: bool = False,
        is_hurried: Callable[[], bool] = lambda: False,
    ) -> Iterator["BackgroundTurn"]:
        """One piece of work, which no other runs beside. `idle_only`: not while answers are in the
        making. `is_hurried`: it goes on beside answers as in idle time, as long as that is true.
        Raises GaveUp once `ended` is set."""
        turn = BackgroundTurn(self, ended, idle_only, is_hurried)
        while True:
            if idle_only:
                turn.wait()  # not with the lock: others have their share while answers are made
            if ended.is_set():
                raise GaveUp
            if self._one.acquire(timeout=LOOK_S):
                if not idle_only or self.is_quiet():
                    break
                self._one.release()
        try:
            yield turn
        finally:
            self._one.release()

    def is_quiet(self) -> bool:
        """Whether no answer is in the making, and none was a moment ago."""
        return self._answers.wait_for_quiet(QUIET_S, 0.0)

    def wait_a_moment(self, *, idle_only: bool) -> float | None:
        """Return for how long the engine may be had now, after waiting a moment for it; None: not
        yet."""
        if self.is_quiet():
            return SLICE_S
        left_s = LOOK_S
        if not idle_only and self.share > 0:
            self._save_up()
            if self._saved_s >= LEAST_S:
                return self._saved_s
            rate = self.share * (AWAITED if self._answers.is_awaited() else 1.0)
            left_s = min(LOOK_S, (LEAST_S - self._saved_s) / rate)
        return SLICE_S if self._answers.wait_for_quiet(QUIET_S, left_s) else None

    def record_hold(self, seconds: float) -> None:
        """Record that the engine was had for so long: beside answers it is taken from what was
        saved up."""
        self._save_up()
        if not self.is_quiet():  # what a hurry took is not paid back: others would starve
            self._saved_s = max(-MOST_SAVED_S, self._saved_s - seconds)

    def _save_up(self) -> None:
        """Add the share of the time since the last call."""
        before, self._counted = self._counted, self._answers.busy_seconds()
        awaited_s = self._counted.awaited - before.awaited
        told_s = self._counted.told - before.told
        more_s = self.share * (AWAITED * awaited_s + told_s)
        self._saved_s = min(MOST_SAVED_S, self._saved_s + more_s)


@dataclass(eq=False)
class BackgroundTurn:
    """Says when each short use of the engine within one piece of work may begin, and how long it
    may last: a `fuse.encode.chunk_encoder.Pace`. On the thread that has the turn."""

    _pace: BackgroundPace
    _ended: threading.Event
    _idle_only: bool
    _is_hurried: Callable[[], bool]

    def wait(self) -> float:
        """Wait until the engine may be had; return for how many seconds. Raises GaveUp if that is
        no longer wanted."""
        while not self._ended.is_set():
            if self._is_hurried() and not self._idle_only:
                return SLICE_S
            seconds = self._pace.wait_a_moment(idle_only=self._idle_only)
            if seconds is not None:
                return seconds
        raise GaveUp

    def record_hold(self, seconds: float) -> None:
        """Record that the engine was had for so long."""
        self._pace.record_hold(seconds)
