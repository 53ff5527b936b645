"""Device memory that layers of chunk KV land in, and the stream that copies them there.

A ring has slots of one layer each. Copies run on a stream of their own, in the order they are
asked for; a copy into a slot waits on the device until the layer before it was taken out, and
whoever takes a layer out waits on the device until it is in. The host waits for nobody.

On a CPU the same calls copy at once: the order of things is tested there.
"""

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

RING_BYTES = 1 << 30  # of slots, unless two layers need more
GAIN = 0.3  # weight of the newest observation in a moving estimate


def new_event(*, timed: bool = True) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def seconds_between(began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    """Of the device; 0 while it has not got to the second event."""
    if not ended.query():  # type: ignore[no-untyped-call]
        return 0.0
    return float(began.elapsed_time(ended)) / 1e3


def depth_for(
    layer_bytes: int, bytes_per_s: float, start_s: float, num_layers: int, ring_bytes: int
) -> int:
    """How many layers to bring ahead: three, and what the link carries before the pass begins.

    A link slower than compute never gets further ahead than what came before the start, and for a
    faster one a layer that is read, one that is copied and one that waits keep both busy. More
    would hold memory, and make the first layer wait for orders about the last. `start_s` is how
    long rows are chosen before the pass takes its first layer.
    """
    layer_s = layer_bytes / bytes_per_s
    wanted = 3 + math.ceil(start_s / layer_s) if math.isfinite(start_s) else num_layers
    return max(2, min(wanted, num_layers, ring_bytes // max(1, layer_bytes)))


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one layer. `copied` and `taken` are of its latest use."""

    data: Tensor  # uint8 [layer bytes]
    began: torch.cuda.Event | None = None
    copied: torch.cuda.Event | None = None
    taken: torch.cuda.Event | None = None
    num_bytes: int = 0
    _parts: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def part(self, start: int, size: int) -> Tensor:
        """Bytes [start, start + size). Kept: every layer of a request asks for the same ones."""
        found = self._parts.get((start, size))
        if found is None:
            found = self._parts[start, size] = self.data[start : start + size]
        return found

    def forget_parts(self) -> None:
        """Another request comes."""
        self._parts.clear()


class Ring:
    """Slots on one device, kept from request to request. One user at a time, see `RingPool`."""

    def __init__(self, device: torch.device, ring_bytes: int = RING_BYTES) -> None:
        self.device = device
        self.ring_bytes = ring_bytes
        self.bytes_per_s = 50e9  # of the link, as it has been lately
        self.start_s: dict[str, float] = {}  # until the pass began, by kind of selection
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots: list[Slot] = []
        self._timed: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    def slots(self, layer_bytes: int, count: int) -> list[Slot]:
        """`count` slots of at least `layer_bytes`, ready to be copied to."""
        self._slots = [slot for slot in self._slots if len(slot.data) >= layer_bytes]
        while len(self._slots) < count:
            with torch.inference_mode(False):  # used inside such a mode and outside it
                data = torch.empty(layer_bytes, dtype=torch.uint8, device=self.device)
            if self._stream is not None:
                data.record_stream(self._stream)
            self._slots.append(Slot(data))
        for slot in self._slots:
            slot.forget_parts()
        if self._stream is not None:  # fresh memory may still be read by earlier work
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return self._slots[:count]

    def copy(self, slot: Slot, pieces: Iterable[tuple[int, Tensor]]) -> None:
        """Begin to copy pieces (where to in the slot, bytes on the host) once the slot is free."""
        if self._stream is None:
            for start, piece in pieces:
                slot.part(start, len(piece)).copy_(piece)
            return
        with torch.cuda.stream(self._stream):
            if slot.taken is not None:
                self._stream.wait_event(slot.taken)
            slot.began = new_event()
            slot.began.record()
            there, here, slot.num_bytes = [], [], 0
            for start, piece in pieces:
                size = piece.numel()  # `len` goes through Python
                there.append(slot.part(start, size))
                here.append(piece)
                slot.num_bytes += size
            torch._foreach_copy_(there, here, non_blocking=True)  # a loop, but not in Python
            slot.copied = new_event()
            slot.copied.record()
        self._timed.append((slot.num_bytes, slot.began, slot.copied))

    def wait(self, slot: Slot) -> None:
        """Make the current stream wait until the slot is filled."""
        if slot.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.copied)

    def release(self, slot: Slot) -> None:
        """What the current stream was told so far is the last that reads the slot."""
        if self._stream is not None:
            slot.taken = new_event(timed=False)
            slot.taken.record()

    def finish(self) -> None:
        """Wait until nothing is being copied: the bytes on the host may go after that."""
        if self._stream is None:
            return
        self._stream.synchronize()
        timed, self._timed = self._timed, []
        seconds = sum(seconds_between(began, copied) for _, began, copied in timed)
        size = sum(num_bytes for num_bytes, _, _ in timed)
        if seconds > 0:
            self.bytes_per_s += GAIN * (size / seconds - self.bytes_per_s)

    def started(self, kind: str, start_s: float) -> None:
        """A pass of this kind began so long after its bytes were asked for."""
        before = self.start_s.get(kind, start_s)
        self.start_s[kind] = before + GAIN * (start_s - before)


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
