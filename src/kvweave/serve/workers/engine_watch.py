"""Watches the engine, which computes on one thread: a server whose engine is gone must say so.

Two things are looked at, once a second. A step that takes longer than any step does hangs: a
driver, a lock, a kernel that never ends. Requests that fail one after another, without a token in
between, are either to blame themselves or the device is gone: a request of one token, made here,
tells.

What is found is final. Everybody who waits hears of it, and the process ends, for whoever started
it to start another: a device that failed once does not come back within a process. Where another
process goes on with requests (`kvweave.serve.keeper`), one failure is enough for a trial, and its
client hears of it behind that.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from kvweave.app.hosts import LocalModel
from kvweave.app.weave import Sampling
from kvweave.errors import ConfigError, EngineClosed, KVWeaveError, RequestError
from kvweave.serve.access.errors import ApiError

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks
SUSPECT = 3  # failures in a row
TRIES = 3  # of one trial
BETWEEN_TRIES_S = 0.1
JUDGE_S = 30.0  # that a client waits at most to hear of a failure


class EngineWatch:
    """A thread of its own, from `start` to `close`. Any thread calls those."""

    def __init__(
        self,
        weave: LocalModel,
        stuck_s: float,
        on_broken: Callable[[str], None],
        look_s: float = LOOK_S,
        before_end: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`on_broken` is called once, on the thread, with what is wrong, and `before_end` before
        those who wait hear of it. A step may take `stuck_s`; 0: as long as it likes."""
        self._weave = weave
        self._stuck_s = stuck_s
        self._on_broken = on_broken
        self._before_end = before_end
        self._look_s = look_s
        self._closed = threading.Event()
        self._wake = threading.Event()  # look now
        self._lock = threading.Lock()  # guards the two below
        self._probing: threading.Thread | None = None
        self._judged: Future[bool] = Future()  # of the trial under way: the engine computes
        self._probe_failed: str | None = None
        self._refused_at = 0  # failures in a row when a request of the watch was refused
        self._thread = threading.Thread(target=self._watch, name="engine-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Harmless the second time."""
        self._closed.set()
        self._wake.set()
        with suppress(InvalidStateError):  # nobody judges any more
            self._judged.set_result(True)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def check(self) -> "Future[bool]":
        """Try the engine now; the result is whether it computes. Those who call meanwhile share the
        trial. False comes after `on_broken`."""
        return self._begin_trial(self._weave.engine.pulse().failed_in_row)

    def _begin_trial(self, failed_in_row: int) -> "Future[bool]":
        with self._lock:
            if self._probing is None or not self._probing.is_alive():
                self._judged = Future()
                # on a thread of its own: it may hang, and this one must see it
                self._probing = threading.Thread(
                    target=self._probe,
                    args=(failed_in_row, self._judged),
                    name="probe",
                    daemon=True,
                )
                self._probing.start()
            return self._judged

    def _watch(self) -> None:
        while True:
            self._wake.wait(self._look_s)
            self._wake.clear()
            if self._closed.is_set():
                return
            try:
                wrong = self._look()
            except EngineClosed:
                return
            if wrong is not None:
                log.critical("%s; giving up", wrong)
                self._before_end(wrong)
                self._weave.engine.abandon(wrong)
                self._on_broken(wrong)
                with suppress(InvalidStateError):
                    self._judged.set_result(False)
                return

    def _look(self) -> str | None:
        """What is wrong, in words."""
        pulse = self._weave.engine.pulse()
        if self._stuck_s and pulse.step_s > self._stuck_s:
            return f"the engine hangs: a step has taken more than {self._stuck_s:g} s"
        if self._probe_failed is not None:
            return self._probe_failed
        if not pulse.failed_in_row:
            self._refused_at = 0
        is_probing = self._probing is not None and self._probing.is_alive()
        is_new = pulse.failed_in_row > self._refused_at
        if pulse.failed_in_row >= SUSPECT and is_new and not is_probing:
            log.warning("%d requests failed one after another; trying one", pulse.failed_in_row)
            self._begin_trial(pulse.failed_in_row)
        return None

    def _probe(self, failed_in_row: int, judged: "Future[bool]") -> None:
        """A request that cannot be to blame. A token of it ends the row of failures. One that is
        refused was not computed and tells nothing: the next failure is the time to try again."""
        for tries_left in reversed(range(TRIES)):
            try:
                self._weave.complete((0,), sampling=Sampling(max_tokens=1), reuse="full").finish()
            except EngineClosed:
                pass
            except (RequestError, ConfigError) as error:
                log.warning("the request that was to tell was refused: %s", error)
                self._refused_at = failed_in_row
            except Exception as error:
                if tries_left:
                    time.sleep(BETWEEN_TRIES_S)
                    continue
                self._probe_failed = f"the engine cannot compute any more ({type(error).__name__})"
                self._wake.set()
                return
            with suppress(InvalidStateError):  # given up meanwhile
                judged.set_result(True)
            return


class EngineTrial:
    """What stands between a request that failed and its client's hearing of it."""

    def __init__(self) -> None:
        self.watches: Sequence[EngineWatch] = ()  # none: clients hear at once

    async def judge(self, error: Exception) -> None:
        """Return once it is known whether an engine is lost, if `error` may come of that. Raises
        EngineClosed if one is."""
        if not self.watches or isinstance(error, (KVWeaveError, ApiError)):
            return
        trials = [asyncio.wrap_future(watch.check()) for watch in self.watches]
        judged, _ = await asyncio.wait(trials, timeout=JUDGE_S)
        if not all(trial.result() for trial in judged):
            raise EngineClosed("the engine was lost before the answer was finished; ask again")
