"""What was measured: of the model, by calibration, and of this machine, by the clock."""

import logging
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from functools import cached_property

from kvweave.app.auto.machine_profile import (
    Measurement,
    find_machine,
    new_machine,
    profile_path,
    save,
)
from kvweave.app.auto.other_work import BUSY_CORES, OtherWork
from kvweave.app.library.runtime import EngineClient, ModelRuntime
from kvweave.calibrate.profiles import Profile, find_profile
from kvweave.errors import ConfigError, EngineClosed
from kvweave.fuse.strategy import ModelFacts
from kvweave.model.decoder import Decoder
from kvweave.plan.profile import MachineProfile
from kvweave.reasons import Reason

log = logging.getLogger(__name__)
SAVE_EVERY_S = 10.0  # at most: what answers taught outlives a process that is killed
PIECE_S = 0.3  # the longest run
PAUSE_S = 0.5  # between two runs, in which no answer may have begun
LOOK_S = 0.5  # how often a wait looks whether it is to end


class Measurements:
    """What is known of one model on one machine, for chunk KV of one codec. Any thread, unless a
    method says otherwise. `close` it to keep what the last answers taught."""

    def __init__(self, runtime: ModelRuntime, codec: str, profile: Profile | None = None) -> None:
        """`profile` stands in for the model's own."""
        self.decoder = runtime.decoder
        self._tokenizer = runtime.tokenizer
        self._client = runtime.client
        self._codec = codec
        self._given_profile = profile
        self._machine: MachineProfile | None = None
        self._kept: MachineProfile | None = None  # read for prices alone, before a plan was made
        self._idle: IdleMeasurement | None = None
        self._is_measured = False
        self._starting = threading.Lock()
        self._saved_s = time.monotonic()
        self.lock = threading.Lock()  # guards what answers move: prices

    def settle(self) -> None:
        """Measure no more; the engine still runs. Harmless the second time."""
        if self._idle is not None:
            self._idle.close()

    def close(self) -> None:
        """Keep what was learnt of the machine."""
        self.settle()
        self._save()

    def keep_lessons(self) -> None:
        """Write what answers taught to the disk, now and then."""
        now_s = time.monotonic()
        if now_s - self._saved_s >= SAVE_EVERY_S:
            self._saved_s = now_s
            self._save()

    def _save(self) -> None:
        if self._machine is not None:
            with self.lock:
                kept = deepcopy(self._machine)
            save(kept, profile_path(self.decoder, self._codec))

    @cached_property
    def profile(self) -> Profile | None:
        """What was measured of the model: the user's profile, or the packaged one."""
        if self._given_profile is not None:
            return self._given_profile
        return find_profile(self.decoder.calibrated_as.fingerprint, self._tokenizer.fingerprint)

    @property
    def is_permitted(self) -> bool:
        """Whether the weights are random, so that no calibration is asked for."""
        return self._given_profile is None and self.decoder.weights.is_random

    @cached_property
    def doubt(self) -> str | None:
        """Why there is no profile of the model that can be used, and the way out; None: there is
        one."""
        if self.is_permitted:
            return None
        try:
            return Reason.NO_PROFILE if self.profile is None else None
        except ConfigError as error:
            log.warning("%s", error)
            return str(error)

    @cached_property
    def facts(self) -> ModelFacts:
        """What strategies must know of the model, from its profile if it has one."""
        num_layers = self.decoder.spec.num_layers
        return ModelFacts(num_layers) if self.profile is None else self.profile.facts(num_layers)

    @property
    def is_measured(self) -> bool:
        """Whether planning would not measure this machine first."""
        if not self._is_measured:  # a file is looked for until there is one
            found = self._machine is not None or self._codec in self._client.measured
            self._is_measured = found or find_machine(self.decoder, self._codec) is not None
        return self._is_measured

    def full_prefill_s(self, num_tokens: int) -> float | None:
        """What computing a prompt of so many tokens takes here, about, by what is known. None:
        nothing is, and nothing is measured for it."""
        machine = self._machine or self._client.measured.get(self._codec) or self._kept
        if machine is None and self.is_measured:
            machine = self._kept = find_machine(self.decoder, self._codec)
        if machine is None:
            return None
        with self.lock:
            return machine.prefill_s(0, num_tokens)

    def measure(self) -> None:
        """Measure this machine, unless it was: seconds, in which the engine does nothing else."""
        self._client.run_alone(lambda: self.machine)

    @property
    def machine(self) -> MachineProfile:
        """What things cost here; read and moved under `lock`. On the engine thread: the first time
        it may measure."""
        if self._machine is None:
            self._machine = self._open()
        return self._machine

    def measure_when_idle(self) -> None:
        """Have a machine that never was measured measured, in idle time and in small pieces, or one
        that was while other programs used it, once they rest. Waits for nothing."""
        machine = self._machine
        if self.is_measured and (machine is None or not machine.is_provisional):
            return
        with self._starting:
            if self._idle is None:
                how = self.decoder, self._codec, self._client, self._renew
                self._idle = IdleMeasurement(*how, waits_for_others=machine is not None)

    def _renew(self, measured: MachineProfile) -> None:
        with self.lock:
            if self._machine is not None:
                self._machine.renew(measured)
            else:  # where it cannot be kept in a file
                self._client.measured[self._codec] = measured

    def _open(self) -> MachineProfile:
        measured, codec = self._client.measured, self._codec
        kept = find_machine(self.decoder, codec)  # with what answers taught it since
        if kept is not None:
            return kept
        if codec not in measured:
            measured[codec] = new_machine(self.decoder, codec)
        return deepcopy(measured[codec])  # where nothing can be kept, others need it too


class IdleMeasurement:
    """Measures a machine that never was, in idle time and in small pieces, on a thread of its own.
    Any thread; only `close` and `wait` wait.

    Every run of the measurement waits for a moment without an answer, has the engine for a fraction
    of a second, and leaves it: an answer that comes meanwhile waits for one run at most.

    The thread ends when the machine is measured, with `close`, and by itself when the main thread
    has ended.
    """

    def __init__(
        self,
        decoder: Decoder,
        codec: str,
        client: EngineClient,
        found: Callable[[MachineProfile], None],
        *,
        waits_for_others: bool = False,
    ) -> None:
        """Begin to measure. `found` is called with the saved profile, on the thread that measures:
        its owner takes the prices over under its own lock. `waits_for_others`: no run begins while
        other programs use the machine, and what they disturbed is measured once more."""
        self._decoder = decoder
        self._codec = codec
        self._client = client
        self._found = found
        self._waits_for_others = waits_for_others
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
            measurement = None
            while self._wait_until_idle():
                if measurement is None:
                    measurement = Measurement(self._decoder, self._codec, PIECE_S)
                if not self._client.run_alone(measurement.step):
                    profile = measurement.profile()
                    if profile.is_provisional and self._waits_for_others:
                        measurement = None
                        continue
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
            others = OtherWork()
            if self._closing.wait(PAUSE_S):
                break
            if self._waits_for_others and others.cores() > BUSY_CORES:
                continue
            if self._client.answers.wait_for_none(0.0):
                return True
        return False
