"""How much memory the process has."""

import os
from pathlib import Path

STATM = Path("/proc/self/statm")  # of Linux


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None where that cannot be told."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
