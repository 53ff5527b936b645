"""What was measured: of the model, by calibration, and of this machine, by the clock."""

import logging
import threading
import time
from copy import deepcopy
from functools import cached_property

from kvweave.app.auto.idle_measurement import IdleMeasurement
from kvweave.app.auto.machine_profile import find_machine, new_machine, profile_path, save
from kvweave.app.library.runtime import ModelRuntime
from kvweave.calibrate.profiles import Profile, find_profile
from kvweave.errors import ConfigError
from kvweave.fuse.strategy import ModelFacts
from kvweave.plan.profile import MachineProfile
from kvweave.reasons import Reason

log = logging.getLogger(__name__)

SAVE_EVERY_S = 10.0  # at most: what answers taught outlives a process that is killed


class Measurements:
    """Of one model on one machine, for chunk KV of one codec. Any thread, unless a method says
    otherwise. `close` it to keep what the last answers taught."""

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

    @cached_property
    def doubt(self) -> str | None:
        """Why there is no profile of the model that can be used, and the way out; None: there is
        one."""
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
        """Have a machine that never was measured measured, in idle time and in small pieces. Waits
        for nothing."""
        if self.is_measured:
            return
        with self._starting:
            if self._idle is None:
                self._idle = IdleMeasurement(self.decoder, self._codec, self._client, self._renew)

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
