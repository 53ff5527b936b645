"""When work that can wait may have the engine: while no answer is in the making, and else for a
small share of the time, so that a server which is never idle gets on with it as well.

All background work over one engine goes through one `BackgroundPace`: one piece at a time, whoever
does it, and the share is that of all together.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_S = 0.5  # without an answer: the next question of a conversation often comes at once
BUSY_SHARE = 0.1  # of the time, while answers are in the making; 0: none
FIRST_S = 0.05  # an answer is left alone until a piece of this length is within the share
LOOK_S = 0.2  # how often one who waits looks whether it is to end


class GaveUp(Exception):
    """What waited for its turn is no longer wanted."""


class ActiveAnswers:
    """How many answers are in the making. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num = 0
        self._ended_s = -math.inf  # when the last one did, by time.monotonic
        self._busy_since_s = -math.inf

    @property
    def busy_since_s(self) -> float:
        """When the first answer began since it was quiet, by time.monotonic."""
        return self._busy_since_s

    @contextmanager
    def one(self) -> Iterator[None]:
        """An answer is in the making inside the `with`."""
        with self._changed:
            now_s = time.monotonic()
            if not self._num and now_s - self._ended_s >= QUIET_S:
                self._busy_since_s = now_s
            self._num += 1
        try:
            yield
        finally:
            with self._changed:
                self._num -= 1
                self._ended_s = time.monotonic()
                self._changed.notify_all()

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
        """`share` of the time is taken while answers are in the making."""
        self.share = share
        self._answers = answers
        self._one = threading.Lock()  # held for a piece of work
        self._rests_until_s = -math.inf  # while answers are in the making

    @contextmanager
    def turn(
        self, ended: threading.Event, *, idle_only: bool = False
    ) -> Iterator["BackgroundTurn"]:
        """One piece of work, which no other runs beside. `idle_only`: not while answers are in the
        making. Raises GaveUp once `ended` is set."""
        turn = BackgroundTurn(self, ended, idle_only)
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

    def wait_a_moment(self, *, idle_only: bool) -> bool:
        """Whether the engine may be had now, after waiting a moment for it."""
        answers, share = self._answers, 0.0 if idle_only else self.share
        if self.is_quiet():
            return True
        left_s = LOOK_S
        if share > 0:
            allowed_s = max(self._rests_until_s, answers.busy_since_s + FIRST_S / share)
            left_s = min(LOOK_S, allowed_s - time.monotonic())
            if left_s <= 0:
                return True
        return answers.wait_for_quiet(QUIET_S, left_s)

    def rest(self, took_s: float) -> None:
        """The engine was had for so long: answers have it for themselves as much longer as the
        share says."""
        if self.share > 0:
            self._rests_until_s = time.monotonic() + took_s * (1 / self.share - 1)


class BackgroundTurn:
    """Says when each short use of the engine within one piece of work may begin: a
    `fuse.encode.chunk_encoder.Pace`. On the thread that has the turn."""

    def __init__(self, pace: BackgroundPace, ended: threading.Event, idle_only: bool) -> None:
        self._pace = pace
        self._ended = ended
        self._idle_only = idle_only

    def wait(self) -> None:
        """Until the engine may be had. Raises GaveUp if that is no longer wanted."""
        while not self._ended.is_set():
            if self._pace.wait_a_moment(idle_only=self._idle_only):
                return
        raise GaveUp

    def record_hold(self, seconds: float) -> None:
        """It was had for so long."""
        self._pace.rest(seconds)
