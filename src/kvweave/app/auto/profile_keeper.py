"""Measures a machine again that is in doubt, in idle time and in small pieces.

A profile may have been measured while other work ran, or with other software; or answers take other
times than it says, again and again. Then every run of a new measurement waits for a moment without
an answer, has the engine for a fraction of a second, and leaves it: an answer that comes meanwhile
waits for one run at most.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvweave.app.auto.machine_profile import Measurement, find_machine, profile_path, save
from kvweave.app.runtime import EngineClient
from kvweave.errors import EngineClosed
from kvweave.model.decoder import Decoder
from kvweave.plan.plausibility import correct
from kvweave.plan.profile import SURPRISE, MachineProfile

log = logging.getLogger(__name__)

PIECE_S = 0.3  # the longest run
PAUSE_S = 0.5  # between two runs, in which no answer may have begun
LOOK_S = 0.5  # how often a wait looks whether it is to end
OFF_IN_A_ROW = 8  # answers that took twice or half of what was predicted
REST_S = 600.0  # between two measurements: a machine that is always busy is not always measured


class ProfileKeeper:
    """Renews one machine's profile. Any thread; nothing here waits but `close` and `wait`.

    The thread that measures lives while something is in doubt. It ends with `close`, and by itself
    when the main thread has.
    """

    def __init__(
        self,
        decoder: Decoder,
        codec: str,
        client: EngineClient,
        machine: MachineProfile | None,
        renewed: Callable[[MachineProfile], None],
    ) -> None:
        """`renewed` is called with a new measurement, on the keeper's thread: its owner takes the
        prices over under its own lock. What `machine` is in doubt of is looked into at once, and
        so is one that never was measured: None."""
        self._decoder = decoder
        self._codec = codec
        self._client = client
        self._renewed = renewed
        self._measured_s = 0.0 if machine is None else machine.measured_s
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._off = 0  # answers in a row; below 0: that took less than predicted
        self._rests_until_s = 0.0
        if machine is None:
            self.doubt("it never was")
        elif machine.doubts:
            self.doubt(machine.doubts[0])

    def took(self, predicted_s: float, actual_s: float) -> None:
        """An answer took so long that had the engine for itself. Several in a row that were far off
        put the profile in doubt."""
        if predicted_s <= 0 or actual_s <= 0:
            return
        error = actual_s / predicted_s
        with self._lock:
            way = 1 if error > SURPRISE else -1 if error < 1 / SURPRISE else 0
            self._off = way * (abs(self._off) + 1 if self._off * way > 0 else 1)
            is_off = abs(self._off) >= OFF_IN_A_ROW
            if is_off:
                self._off = 0
        if is_off:
            words = "longer" if way > 0 else "less"
            self.doubt(f"{OFF_IN_A_ROW} answers in a row took far {words} than predicted")

    def doubt(self, reason: str) -> None:
        """Measure again as soon as the machine is idle."""
        with self._lock:
            if self._closing.is_set() or self._thread is not None:
                return
            if time.monotonic() < self._rests_until_s:
                return
            log.info("this machine is measured in idle time: %s", reason)
            self._thread = threading.Thread(target=self._work, name="profile-keeper")
            self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is in doubt. False: it takes longer."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """Measure no more. A run under way ends first."""
        self._closing.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    @property
    def _path(self) -> Path:
        return profile_path(self._decoder, self._codec)

    def _work(self) -> None:
        try:
            found = self._newer() or self._measure()
            if found is not None:
                self._measured_s = found.measured_s
                self._renewed(found)
        except EngineClosed:  # the model went before its keeper
            pass
        except Exception:  # what the device raises: answers go on, and it must be seen
            log.exception("the machine could not be measured again")
        finally:
            with self._lock:
                self._rests_until_s = time.monotonic() + REST_S
                self._thread = None

    def _newer(self) -> MachineProfile | None:
        """What another keeper, or `kvweave measure`, has found since."""
        kept = find_machine(self._decoder, self._codec)
        is_newer = kept is not None and kept.measured_s > self._measured_s and not kept.doubts
        return kept if is_newer else None

    def _measure(self) -> MachineProfile | None:
        """A new profile, saved; None: the keeper is to end."""
        measurement = Measurement(self._decoder, self._codec, PIECE_S)
        for last in (False, True):
            while True:
                if not self._is_idle():
                    return None
                if not self._client.run_alone(measurement.step):
                    break
            found = measurement.profile()
            if not found.doubts or last:
                break
            measurement.more()
        if found.doubts:
            correct(found)
            log.warning("measured again, and still in doubt: %s", "; ".join(found.doubts))
        else:
            log.info("measured again: %s", self._path)
        save(found, self._path)
        return found

    def _is_idle(self) -> bool:
        """Wait for a moment without answers. False: the keeper is to end."""
        while not self._closing.is_set() and threading.main_thread().is_alive():
            if not self._client.answers.wait_for_none(LOOK_S):
                continue
            if self._closing.wait(PAUSE_S):
                break
            if self._client.answers.wait_for_none(0.0):
                return True
        return False
