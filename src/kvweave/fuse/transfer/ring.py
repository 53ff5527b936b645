"""Device memory that layers of chunk KV land in, and the stream that copies them there.

A ring is one piece of memory, cut into units of one layer for each request. A slot is some units
side by side, for a group of layers that travel together. Copies run on a stream of their own, in
the order they are asked for; a copy into a slot waits on the device until what lay there was taken
out, and the stream of the request waits on the device until layers are in. The host never waits.

On a CPU the same calls copy at once: the order of things is tested there.
"""

import math
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

RING_BYTES = 1 << 30  # of units, unless two layers need more
GAIN = 0.3  # weight of the newest observation in a moving estimate


def new_event(*, timed: bool = True) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def seconds_between(began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    """Return the device's seconds between two events; 0 while it has not got to the second."""
    if not ended.query():  # type: ignore[no-untyped-call]
        return 0.0
    return float(began.elapsed_time(ended)) / 1e3


def depth_for(
    layer_bytes: int,
    bytes_per_s: float,
    start_s: float,
    num_layers: int,
    ring_bytes: int,
    group: int = 1,
) -> int:
    """How many layers to bring ahead: three groups, and what the link carries before the pass.

    A link slower than compute never gets further ahead than what came before the start, and for a
    faster one a group that is read, one that is copied and one that waits keep both busy. More
    would hold memory, and make the first layer wait for orders about the last. `start_s` is how
    long rows are chosen before the pass takes its first layer. Groups double up to `group` layers:
    all of those together count as the first one.
    """
    layer_s = layer_bytes / bytes_per_s
    wanted = 4 * group - 1 + math.ceil(start_s / layer_s) if math.isfinite(start_s) else num_layers
    return max(2, min(wanted, num_layers, ring_bytes // max(1, layer_bytes)))


@dataclass(slots=True, eq=False)
class Slot:
    """Units that hold a group of layers, from when they are to be filled until they are free."""

    layers: range
    units: range
    data: Tensor  # uint8 [units * unit bytes]
    left: int  # layers that were not taken out yet
    copied: torch.cuda.Event | None = None


class Ring:
    """Units on one device, kept from request to request. One user at a time, see `RingPool`."""

    def __init__(self, device: torch.device, ring_bytes: int = RING_BYTES) -> None:
        self.device = device
        self.ring_bytes = ring_bytes
        self.bytes_per_s = 50e9  # of the link, as it has been lately
        self.start_s: dict[str, float] = {}  # until the pass began, by kind of selection
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._compute: torch.cuda.Stream | None = None  # of the request that has the ring
        self._last_read: torch.cuda.Event | None = None  # of the one that had it before
        self._data = torch.empty(0, dtype=torch.uint8)
        self._unit_bytes = 0
        self._free: list[bool] = []
        self._taken: list[torch.cuda.Event | None] = []  # of a unit: when it was last read
        self._next = 0  # unit behind the slot that was given out last
        self._timed: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    def cut(self, unit_bytes: int, count: int) -> None:
        """Begin a request with `count` free units. Its kernels run on the stream that is
        current."""
        if len(self._data) < unit_bytes * count:
            self._data = torch.empty(0, dtype=torch.uint8)  # goes before more is asked for
            with torch.inference_mode(False):  # used inside such a mode and outside it
                self._data = torch.empty(unit_bytes * count, dtype=torch.uint8, device=self.device)
            if self._stream is not None:
                self._data.record_stream(self._stream)
            self._last_read = None
        self._unit_bytes = unit_bytes
        self._free = [True] * count
        self._taken = [None] * count
        self._next = 0
        if self._stream is None:
            return
        self._compute = torch.cuda.current_stream(self.device)
        if self._last_read is None:  # fresh memory: whatever was told before may still use it
            self._stream.wait_stream(self._compute)
        else:  # but what a probe was told for this request is nothing to wait for
            self._stream.wait_event(self._last_read)
            self._last_read = None

    def slot(self, layers: range) -> Slot | None:
        """Take the units for a group of layers that have been free for longest; None: not now."""
        size, count = len(layers), len(self._free)
        for start in (*range(self._next, count), *range(self._next)):
            units = range(start, start + size)
            if units.stop <= count and all(self._free[start : units.stop]):
                break
        else:
            return None
        self._free[start : units.stop] = [False] * size
        self._next = units.stop % count
        data = self._data.narrow(0, start * self._unit_bytes, size * self._unit_bytes)
        return Slot(layers, units, data, size)

    def copy(self, slot: Slot, there: list[Tensor], here: list[Tensor]) -> None:
        """Begin to copy host memory to parts of the slot, once its units were taken out."""
        if self._stream is None:
            for part, source in zip(there, here, strict=True):
                part.copy_(source)
            return
        began, copied = new_event(), new_event()
        with torch.cuda.stream(self._stream):
            before = None
            for taken in self._taken[slot.units.start : slot.units.stop]:
                if taken is not None and taken is not before:  # groups have one for all units
                    self._stream.wait_event(taken)
                before = taken
            began.record(self._stream)
            torch._foreach_copy_(there, here, non_blocking=True)  # a loop, but not in Python
            copied.record(self._stream)
        slot.copied = copied
        self._timed.append((sum(map(len, here)), began, copied))

    def wait(self, slot: Slot) -> None:
        """Make the request's stream wait until the slot is filled."""
        if slot.copied is not None:
            assert self._compute is not None, "the ring was cut"
            self._compute.wait_event(slot.copied)

    def release(self, slot: Slot) -> None:
        """Free a slot once the device has done what the request's stream was told so far."""
        self._free[slot.units.start : slot.units.stop] = [True] * len(slot.units)
        if self._stream is not None:
            taken = new_event(timed=False)
            taken.record(self._compute)
            self._taken[slot.units.start : slot.units.stop] = [taken] * len(slot.units)

    def finish(self) -> None:
        """Wait until nothing is being copied: the bytes on the host may go after that.

        The request has given its last order that reads the ring.
        """
        if self._stream is None:
            return
        if self._compute is not None:
            self._last_read = new_event(timed=False)
            self._last_read.record(self._compute)
        self._stream.synchronize()
        timed, self._timed = self._timed, []
        seconds = sum(seconds_between(began, copied) for _, began, copied in timed)
        size = sum(num_bytes for num_bytes, _, _ in timed)
        if seconds > 0:
            self.bytes_per_s += GAIN * (size / seconds - self.bytes_per_s)

    def record_start(self, kind: str, start_s: float) -> None:
        """Record how long after its bytes were asked for a pass of this kind began.

        Follows a shorter time at once: a longer one may have compiled or recorded something.
        """
        before = self.start_s.get(kind, start_s)
        self.start_s[kind] = min(start_s, before + GAIN * (start_s - before))


class RingPool:
    """Rings of this process, lent to one request each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[torch.device, list[Ring]] = {}

    def take(self, device: torch.device) -> Ring:
        with self._lock:
            idle = self._idle.get(device)
            return idle.pop() if idle else Ring(device)

    def give_back(self, ring: Ring) -> None:
        with self._lock:
            self._idle.setdefault(ring.device, []).append(ring)


RINGS = RingPool()
