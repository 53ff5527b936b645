"""Keeps memory that was freed for what comes next.

A pass over a model allocates buffers of megabytes and frees them again. glibc takes such sizes from
the kernel and gives them back each time, and the kernel hands out zeroed pages. Told to keep them,
the next layer finds them warm.
"""

import ctypes
import os
import sys

KEPT_BYTES = 512 << 20  # of freed memory, before some is given back
LARGEST = 32 << 20  # bytes of one buffer; glibc takes no more, larger ones come from the kernel
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed_memory() -> bool:
    """For the whole process, from now on. False where the C library is another one or the user has
    settings of their own (`MALLOC_…`, `LD_PRELOAD`). Any thread, as often as you like."""
    is_tuned = any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in os.environ)
    if is_tuned or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has none
        return False
    kept: int = mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    taken: int = mallopt(_M_MMAP_THRESHOLD, LARGEST)
    return kept == taken == 1
