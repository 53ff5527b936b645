"""Page-aligned host memory that can be sliced as bytes and as a tensor, and used again.

Fresh memory is slow memory: the kernel zeroes each page at first touch. Reading 12 MiB from the
page cache into it gives 2.0 GB/s in shared pages, 2.4 in private ones, 4.4 in private huge ones and
6 to 7 where the pages were touched before (best of 40, 2-core Xeon). So memory is private and huge
where the system has that, the host tier takes one arena and reuses it, and transfers take staging
buffers from a pool.
"""

import logging
import mmap
import threading
import weakref
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvweave.kv.layout import round_up

log = logging.getLogger(__name__)

_HUGE_BYTES = 2 << 20  # ask for huge pages from here on: fewer faults, fewer TLB misses
_LOCK_TRIES = 4
_CLASS_BYTES = 1 << 20  # buffers of nearby sizes share a size class


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A run of host bytes. `tensor` and `view` are two names for the same bytes."""

    tensor: Tensor  # uint8 [n]
    view: memoryview  # writable
    start: int | None = field(default=None)  # offset in the arena it came from, if any


def new_memory(size_bytes: int, *, pinned: bool) -> Memory:
    """Page-aligned memory; page-locked if asked, which needs CUDA and commits it at once."""
    if size_bytes == 0:
        return Memory(torch.empty(0, dtype=torch.uint8), memoryview(bytearray()))
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    view = _locked(pages) if pinned else memoryview(pages)
    return Memory(torch.frombuffer(view, dtype=torch.uint8), view)


def _locked(pages: mmap.mmap) -> memoryview:
    """Page-lock memory for as long as anybody looks at it, or say that it could not be.

    Registered rather than allocated by torch, whose allocator rounds up to a power of two: a chunk
    of 64 MiB and a header would take 128. The kernel may have to move pages first and can fail at
    that; unlocked memory is slower to copy from, and right.
    """
    holder = np.frombuffer(pages, dtype=np.uint8)  # unlike pages, gone before they are unmapped
    address = holder.ctypes.data
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.current_stream()  # registering wants a context
    for _ in range(_LOCK_TRIES):
        error = int(runtime.cudaHostRegister(address, len(pages), 0))
        if error == 0:
            weakref.finalize(holder, runtime.cudaHostUnregister, address).atexit = False
            return holder.data
    log.warning(
        "%d bytes of host memory cannot be page-locked (CUDA error %d): copies from them to the "
        "GPU will be slower; give the host tier less, or pinned=False",
        len(pages),
        error,
    )
    return memoryview(pages)


def slice_memory(memory: Memory, start: int, size_bytes: int) -> Memory:
    end = start + size_bytes
    return Memory(memory.tensor[start:end], memory.view[start:end], start)


class BufferPool:
    """Staging buffers for bytes that pass through without staying. Thread-safe, never blocks.

    Keeps at most `keep_bytes` of idle buffers; what is handed out is bounded by whoever asks.
    """

    def __init__(self, keep_bytes: int, *, pinned: bool) -> None:
        self._keep_bytes = keep_bytes
        self._pinned = pinned
        self._lock = threading.Lock()
        self._idle: dict[int, list[Memory]] = {}  # class size → buffers
        self._idle_bytes = 0

    def take(self, size_bytes: int) -> Memory:
        """A buffer of at least this size. Its bytes are whatever they were."""
        size = round_up(max(1, size_bytes), _CLASS_BYTES)
        with self._lock:
            if self._idle.get(size):
                self._idle_bytes -= size
                return self._idle[size].pop()
        return new_memory(size, pinned=self._pinned)

    def give_back(self, memory: Memory) -> None:
        """The caller promises that nothing looks at these bytes any more."""
        size = len(memory.view)
        with self._lock:
            if self._idle_bytes + size <= self._keep_bytes:
                self._idle.setdefault(size, []).append(memory)
                self._idle_bytes += size
