"""Page-aligned host memory that can be sliced as bytes and as a tensor, and used again.

Fresh memory is slow memory: the kernel zeroes each page at first touch. Reading 12 MiB from the
page cache into it gives 2.0 GB/s in shared pages, 2.4 in private ones, 4.4 in private huge ones and
6 to 7 where the pages were touched before (best of 40, 2-core Xeon). So memory is private and huge
where the system has that, the host tier takes one arena and reuses it, and transfers take staging
buffers from a pool.
"""

import atexit
import bisect
import logging
import mmap
import queue
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvweave.kv.format.header import ALIGN, round_up

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
    """Page-aligned memory; page-locked if asked, which needs CUDA and commits it at once.

    Never fails for want of locking: unlocked memory is slower to copy from, and right.
    """
    if size_bytes == 0:
        return Memory(torch.empty(0, dtype=torch.uint8), memoryview(bytearray()))
    if pinned:
        view = _register_pages(size_bytes)
        if view is not None:
            return Memory(torch.frombuffer(view, dtype=torch.uint8), view)
        tensor = _allocate_locked(size_bytes)
        if tensor is not None:
            return Memory(tensor, tensor.numpy().data)
        _say_unlocked(size_bytes)
    view = memoryview(_new_pages(size_bytes))
    return Memory(torch.frombuffer(view, dtype=torch.uint8), view)


def _new_pages(size_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _register_pages(size_bytes: int) -> memoryview | None:
    """Return fresh pages, locked for as long as a view of them lives. None: the system refuses.

    Registered rather than allocated by torch, whose allocator rounds up to a power of two: a chunk
    of 64 MiB and a header would take 128.
    """
    pages = _new_pages(size_bytes)
    holder = np.frombuffer(pages, dtype=np.uint8)
    if not _LOCKER.register(holder.ctypes.data, size_bytes):
        return None
    # the finalizer holds the pages: they are unmapped after their unlocking, not before
    weakref.finalize(holder, _LOCKER.bury, holder.ctypes.data, pages).atexit = False
    return holder.data


def _allocate_locked(size_bytes: int) -> Tensor | None:
    """Allocate locked memory by the driver. Where pages have to be moved before they can be
    locked (memory that was plugged in later) registering fails and this does not."""
    try:
        tensor = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # torch's word for every CUDA error
        return None
    return tensor if tensor.data_ptr() % ALIGN == 0 else None


_unlocked_said = False


def _say_unlocked(size_bytes: int) -> None:
    """Once: a store that cannot lock would say it for every load."""
    global _unlocked_said
    if not _unlocked_said:
        _unlocked_said = True
        log.warning(
            "%d bytes of host memory cannot be page-locked (CUDA error %d): copies from them to "
            "the GPU will be slower; give the host tier less, or pinned=False",
            size_bytes,
            _LOCKER.last_error,
        )


class _Locker:
    """One thread that locks and unlocks memory for all others.

    CUDA keeps a thread's last error until it is asked for, and torch asks after its next kernel: a
    refused lock would fail a pass that has nothing to do with it. A thread that records a graph may
    not unlock at all, and the garbage collector runs where it likes. Neither happens here.

    It ends with the interpreter, not after it: a thread that comes back from CUDA to an interpreter
    that is gone aborts the process. What is locked by then goes with the process.
    """

    def __init__(self) -> None:
        self.last_error = 0
        self._jobs: queue.SimpleQueue[_Lock | tuple[int, mmap.mmap] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._stuck: list[mmap.mmap] = []  # could not be unlocked: never unmapped

    def register(self, address: int, size_bytes: int) -> bool:
        """Lock memory; blocks. False: the system refuses."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        job = _Lock(runtime, address, size_bytes)
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-locker", daemon=True)
                self._thread.start()
                atexit.register(self.close)
            self._jobs.put(job)
        job.done.wait()
        if job.error:
            self.last_error = job.error
        return job.error == 0

    def bury(self, address: int, pages: mmap.mmap) -> None:
        """Unlock memory, then unmap it. Safe inside a garbage collection: takes no lock."""
        self._jobs.put((address, pages))

    def close(self) -> None:
        """Lock and unlock nothing more; wait for what is under way, and for whoever waits for a
        lock. Harmless the second time."""
        with self._lock:
            if self._closed or self._thread is None:
                return
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _Lock):
                job.run()
            elif self._closed:
                self._stuck.append(job[1])  # stays as it is: unlocking takes a while
            else:
                self._unlock(*job)
            del job  # pages go now, not when the next job comes

    def _unlock(self, address: int, pages: mmap.mmap) -> None:
        """Pages that stay locked stay mapped: the next memory at their address would be copied to
        the GPU from theirs."""
        self._stuck.append(pages)
        try:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(runtime.cudaHostUnregister(address))
        except Exception:  # this thread must go on: others wait for it
            log.exception("unlocking %d bytes failed, which is a bug", len(pages))
            return
        if error:
            log.error("%d bytes stay page-locked (CUDA error %d)", len(pages), error)
        else:
            self._stuck.pop()


class _Lock:
    """One wish to lock memory."""

    def __init__(self, runtime: Any, address: int, size_bytes: int) -> None:
        self.done = threading.Event()
        self.error = 0
        self._runtime = runtime
        self._address = address
        self._size_bytes = size_bytes

    def run(self) -> None:
        try:
            torch.cuda.current_stream()  # registering wants a context
            for _ in range(_LOCK_TRIES):  # the kernel may be moving pages
                self.error = int(self._runtime.cudaHostRegister(self._address, self._size_bytes, 0))
                if not self.error:
                    break
        except Exception:  # the thread that waits must hear of it, and uses memory unlocked
            self.error = self.error or -1
            log.exception("locking %d bytes failed, which is a bug", self._size_bytes)
        finally:
            self.done.set()


_LOCKER = _Locker()


def slice_memory(memory: Memory, start: int, size_bytes: int) -> Memory:
    end = start + size_bytes
    return Memory(memory.tensor[start:end], memory.view[start:end], start)


class BufferPool:
    """Staging buffers for bytes that pass through without staying. Thread-safe, never blocks.

    Keeps at most `keep_bytes` of idle buffers; what is handed out is bounded by its callers.
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

    def close(self) -> None:
        """Keep no idle buffers any more."""
        with self._lock:
            self._keep_bytes = self._idle_bytes = 0
            self._idle.clear()


class Arena:
    """Where in one big buffer the next object goes: a best-fit allocator of offsets in
    [0, capacity), with no memory of its own. Not thread-safe.

    Best fit because chunk objects of one model come in few sizes: a hole left by one object is most
    often exactly what the next one needs. Free neighbours are joined at once.
    """

    def __init__(self, capacity_bytes: int, align: int) -> None:
        self.capacity_bytes = capacity_bytes // align * align
        self._align = align
        self._holes: list[tuple[int, int]] = []  # (start, size), by start
        if self.capacity_bytes:
            self._holes.append((0, self.capacity_bytes))
        self._taken: dict[int, int] = {}  # start → size

    def round(self, size_bytes: int) -> int:
        """What an object of this size really occupies."""
        return -(-size_bytes // self._align) * self._align

    def take(self, size_bytes: int) -> int | None:
        """Start of a free run, None if no hole is large enough."""
        size = self.round(size_bytes)
        fitting = [(hole_size, start) for start, hole_size in self._holes if hole_size >= size]
        if not fitting or size == 0:
            return None
        hole_size, start = min(fitting)
        index = bisect.bisect_left(self._holes, (start, 0))
        if hole_size == size:
            del self._holes[index]
        else:
            self._holes[index] = (start + size, hole_size - size)
        self._taken[start] = size
        return start

    def give_back(self, start: int) -> None:
        """Free a run that `take` returned."""
        size = self._taken.pop(start)  # KeyError: freed twice, our own bug
        index = bisect.bisect_left(self._holes, (start, 0))
        if index < len(self._holes) and start + size == self._holes[index][0]:
            size += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == start:
            index -= 1
            start = self._holes[index][0]
            size += self._holes.pop(index)[1]
        self._holes.insert(index, (start, size))
