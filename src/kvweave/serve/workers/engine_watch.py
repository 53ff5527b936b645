"""Watches the engine, which computes on one thread: a server whose engine is gone must say so.

Two things are looked at, once a second. A step that takes longer than any step does hangs: a
driver, a lock, a kernel that never ends. Requests that fail one after another, without a token in
between, are either to blame themselves or the device is gone: a request of one token, made here,
tells.

What is found is final. Everybody who waits hears of it, and the process ends, for whoever started
it to start another: a device that failed once does not come back within a process.
"""

import logging
import threading
from collections.abc import Callable

from kvweave.app.hosts import LocalModel
from kvweave.app.weave import Sampling
from kvweave.errors import ConfigError, EngineClosed, RequestError

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks
SUSPECT = 3  # failures in a row


class EngineWatch:
    """A thread of its own, from `start` to `close`. Any thread calls those."""

    def __init__(
        self,
        weave: LocalModel,
        stuck_s: float,
        on_broken: Callable[[str], None],
        look_s: float = LOOK_S,
    ) -> None:
        """`on_broken` is called once, on the thread, with what is wrong. A step may take `stuck_s`;
        0: as long as it likes."""
        self._weave = weave
        self._stuck_s = stuck_s
        self._on_broken = on_broken
        self._look_s = look_s
        self._closed = threading.Event()
        self._probing: threading.Thread | None = None
        self._probe_failed: str | None = None
        self._refused_at = 0  # failures in a row when a request of the watch was refused
        self._thread = threading.Thread(target=self._watch, name="engine-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Harmless the second time."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._look_s):
            try:
                wrong = self._look()
            except EngineClosed:
                return
            if wrong is not None:
                log.critical("%s; giving up", wrong)
                self._weave.engine.abandon(wrong)
                self._on_broken(wrong)
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
            # on a thread of its own: it may hang, and this one must see it
            self._probing = threading.Thread(
                target=self._probe, args=(pulse.failed_in_row,), name="probe", daemon=True
            )
            self._probing.start()
        return None

    def _probe(self, failed_in_row: int) -> None:
        """A request that cannot be to blame. A token of it ends the row of failures. One that is
        refused was not computed and tells nothing: the next failure is the time to try again."""
        try:
            self._weave.complete((0,), sampling=Sampling(max_tokens=1), reuse="full").finish()
        except EngineClosed:
            return
        except (RequestError, ConfigError) as error:
            log.warning("the request that was to tell was refused: %s", error)
            self._refused_at = failed_in_row
        except Exception as error:
            self._probe_failed = f"the engine cannot compute any more ({type(error).__name__})"
