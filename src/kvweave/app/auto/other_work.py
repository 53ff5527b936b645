"""Whether other programs use this machine while it is measured."""

import os
import time
from pathlib import Path

BUSY_CORES = 0.3  # that others use: what is measured meanwhile is measured again
STAT = Path("/proc/stat")  # of Linux


class OtherWork:
    """The cores that other programs have used since this was made, virtual machines beside this one
    among them. Where the system does not tell, they are taken to rest. For one thread."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._began = _used_by_others_s()

    def cores(self) -> float:
        """Return how many cores others have used on the average."""
        began, now = self._began, _used_by_others_s()
        if began is None or now is None:
            return 0.0
        return max(0.0, now - began) / max(1e-3, time.monotonic() - self._began_s)


def _used_by_others_s() -> float | None:
    """CPU seconds of all programs since the machine was started, less this process's own."""
    try:
        user, nice, system, _, _, irq, soft, stolen = map(int, STAT.read_text().split()[1:9])
    except (OSError, ValueError):
        return None
    ticks = user + nice + system + irq + soft + stolen
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
