"""How much memory is free."""

import os
from pathlib import Path


def free_bytes() -> int:
    """Memory that a process can have, what the system only caches counted in."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass  # no Linux
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
