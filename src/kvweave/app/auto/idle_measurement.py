"""Measures a machine that never was, in idle time and in small pieces.

Every run of the measurement waits for a moment without an answer, has the engine for a fraction of
a second, and leaves it: an answer that comes meanwhile waits for one run at most.
"""

import logging
import threading
from collections.abc import Callable

from kvweave.app.auto.machine_profile import Measurement, profile_path, save
from kvweave.app.library.runtime import EngineClient
from kvweave.errors import EngineClosed
from kvweave.model.decoder import Decoder
from kvweave.plan.profile import MachineProfile

log = logging.getLogger(__name__)

PIECE_S = 0.3  # the longest run
PAUSE_S = 0.5  # between two runs, in which no answer may have begun
LOOK_S = 0.5  # how often a wait looks whether it is to end


class IdleMeasurement:
    """One measurement on a thread of its own. Any thread; only `close` and `wait` wait.

    The thread ends when the machine is measured, with `close`, and by itself when the main thread
    has ended.
    """

    def __init__(
        self,
        decoder: Decoder,
        codec: str,
        client: EngineClient,
        found: Callable[[MachineProfile], None],
    ) -> None:
        """Begin to measure. `found` is called with the saved profile, on the thread that measures:
        its owner takes the prices over under its own lock."""
        self._decoder = decoder
        self._codec = codec
        self._client = client
        self._found = found
        self._closing = threading.Event()
        log.info("this machine is measured in idle time")
        self._thread = threading.Thread(target=self._work, name="idle-measurement")
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is through. False: it takes longer."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Measure no more. A run under way ends first."""
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            measurement = Measurement(self._decoder, self._codec, PIECE_S)
            while self._wait_until_idle():
                if not self._client.run_alone(measurement.step):
                    profile = measurement.profile()
                    save(profile, profile_path(self._decoder, self._codec))
                    self._found(profile)
                    return
        except EngineClosed:  # the model went before its measurement
            pass
        except Exception:  # what the device raises: answers go on, and it must be seen
            log.exception("the machine could not be measured")

    def _wait_until_idle(self) -> bool:
        """Wait for a moment without answers. False: it is to end."""
        while not self._closing.is_set() and threading.main_thread().is_alive():
            if not self._client.answers.wait_for_none(LOOK_S):
                continue
            if self._closing.wait(PAUSE_S):
                break
            if self._client.answers.wait_for_none(0.0):
                return True
        return False
