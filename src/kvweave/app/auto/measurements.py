"""What was measured: of the model, by calibration, and of this machine, by the clock."""

import logging
import threading
from copy import deepcopy
from functools import cached_property

from kvweave.app.auto.machine_profile import (
    find_machine,
    new_machine,
    profile_path,
    save,
    warn_of_doubts,
)
from kvweave.app.auto.profile_keeper import ProfileKeeper
from kvweave.app.runtime import ModelRuntime
from kvweave.calibrate.profiles import Profile, find_profile
from kvweave.errors import ConfigError
from kvweave.fuse.strategy import ModelFacts
from kvweave.plan.profile import MachineProfile

log = logging.getLogger(__name__)

NOT_CALIBRATED = (
    "this model was never calibrated for this chunk KV, so that only what is exact is reused; "
    "`kvweave calibrate quick --kb DIR` does that in minutes"
)


class Measurements:
    """Of one model on one machine, for chunk KV of one codec. Any thread, unless a method says
    otherwise. `close` it to keep what answers taught."""

    def __init__(self, runtime: ModelRuntime, codec: str, profile: Profile | None = None) -> None:
        """`profile` stands in for the model's own."""
        self.decoder = runtime.decoder
        self._tokenizer = runtime.tokenizer
        self._client = runtime.client
        self._codec = codec
        self._given_profile = profile
        self._machine: MachineProfile | None = None
        self._kept: MachineProfile | None = None  # read for prices alone, before a plan was made
        self._keeper: ProfileKeeper | None = None
        self._is_measured = False
        self._keeping = threading.Lock()
        self.lock = threading.Lock()  # guards what answers move: prices

    def settle(self) -> None:
        """Measure no more; the engine still runs. Harmless the second time."""
        if self._keeper is not None:
            self._keeper.close()

    def close(self) -> None:
        """Keep what was learnt of the machine."""
        self.settle()
        if self._machine is not None:
            save(self._machine, profile_path(self.decoder, self._codec))

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
            return NOT_CALIBRATED if self.profile is None else None
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
            self._keep(self._machine)
        return self._machine

    def measure_when_idle(self) -> None:
        """Have a machine that never was measured measured, in idle time and in small pieces. Waits
        for nothing."""
        if not self.is_measured:
            self._keep(None)

    def _keep(self, machine: MachineProfile | None) -> None:
        with self._keeping:
            if self._keeper is None:
                self._keeper = ProfileKeeper(
                    self.decoder, self._codec, self._client, machine, self._renew
                )

    def took(self, predicted_s: float, actual_s: float) -> None:
        """An answer took so long that had the engine for itself. Several that were far off put the
        machine in doubt: it is measured again in idle time."""
        if self._keeper is not None:
            self._keeper.took(predicted_s, actual_s)

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
            warn_of_doubts(kept)
            return kept
        if codec not in measured:
            measured[codec] = new_machine(self.decoder, codec)
        return deepcopy(measured[codec])  # where nothing can be kept, others need it too
