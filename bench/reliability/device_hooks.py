"""Faults at the edge to a device: calls that give it orders are wrapped, and some are done to it.

What can be had for real is real: a GPU that is slow spins in a kernel, one without memory has a
tensor that holds the rest of it, pages are changed where they lie. An error that the driver would
report is raised in its words, because a real one cannot be taken back within a process
(`device_loss.py` has that one). The product has no hook.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from kvweave.engine import lifecycle, offload
from kvweave.engine.offload import CudaLink, OffloadLink, TreePages
from kvweave.fuse.selectors.query_attention import QueryAttention
from kvweave.fuse.sources import StoredChunks
from kvweave.fuse.transfer.ring import Ring, Slot
from kvweave.kernels.host import on_device
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool
from kvweave.model.recorded_decode import RecordedDecode, StepResult
from reliability.fault_hooks import FORWARD, NO_NUMBERS, SELECT
from reliability.fault_rules import (
    CORRUPTED,
    EVICT,
    LOAD_FIRST,
    LOAD_MIDDLE,
    LOOKUP,
    SAVE,
    FaultRule,
    Strikes,
)

POOL = "pool"  # room for KV is made
HAND_OUT = "hand out"  # what a step gave is handed to its requests
CYCLES_PER_S = 1.9e9  # of an H200's clock, roughly: how long a kernel spins
LOST = "CUDA error: unspecified launch failure (injected)"
NO_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB. (injected)"


class DeviceHooks:
    """Wraps what gives a device orders, once for the process; `strikes` says what goes wrong."""

    def __init__(self, device: torch.device, num_layers: int) -> None:
        self.strikes = Strikes()
        self.on_gpu = device.type == "cuda"
        self._middle = num_layers // 2
        self._op = threading.local()  # what the bytes of a tree are moved for
        self._is_gone = False
        self.struck = threading.Event()
        self.marked: int | None = None  # a request that has this token fails, always

    def set(self, rule: FaultRule) -> None:
        self._is_gone = False
        self.struck.clear()
        self.strikes.set(rule)

    def clear(self) -> int:
        self._is_gone = False
        return self.strikes.clear()

    def install(self) -> None:
        self._wrap(Decoder, "forward", FORWARD)
        self._wrap(RecordedDecode, "play", FORWARD)
        self._wrap(KVPool, "copy_rows", LOOKUP)
        self._wrap(KVPool, "__init__", POOL)
        self._wrap(QueryAttention, "ranked", SELECT)
        self._wrap(lifecycle, "_is_close_call", HAND_OUT)
        self._moves(TreePages, "copy_in", LOAD_FIRST)
        self._moves(TreePages, "copy_out", EVICT)
        self._hook_tables()
        self._hook_loads()
        self._hook_links()

    # ---- what is wrapped

    def _wrap(self, owner: Any, name: str, op: str) -> None:
        real = getattr(owner, name)

        @wraps(real)
        def call(*args: Any, **how: Any) -> Any:
            if op == FORWARD and any(self.marked in list(rows.token_ids) for rows in args[1]):
                raise RuntimeError("this request cannot be computed (injected)")
            rule = self._stumble(op)
            found = real(*args, **how)
            if rule is None or rule.kind != NO_NUMBERS or found is None:
                return found
            if isinstance(found, StepResult):
                return found._replace(logits=found.logits * float("nan"))
            return found * float("nan")

        setattr(owner, name, call)

    def _moves(self, owner: Any, name: str, op: str) -> None:
        """Exact KV is moved: what the device is told on the way is told for this."""
        real = getattr(owner, name)

        @wraps(real)
        def call(*args: Any, **how: Any) -> Any:
            self._op.now = op
            try:
                return real(*args, **how)
            finally:
                self._op.now = None

        setattr(owner, name, call)

    def _hook_tables(self) -> None:
        """The table of pages is the first thing that moving exact KV tells the device."""
        real = on_device

        def told(x: Tensor, device: torch.device) -> Tensor:
            op = getattr(self._op, "now", None)
            if op is not None:
                self._stumble(op)
            return real(x, device)

        offload.on_device = told  # type: ignore[attr-defined]

    def _hook_loads(self) -> None:
        real_copy, real_layer, real_lay = Ring.copy, StoredChunks.layer, StoredChunks.lay

        def copy(ring: Ring, slot: Slot, there: list[Tensor], here: list[Tensor]) -> None:
            rule = self._at_layers(slot.layers, ring._stream)
            real_copy(ring, slot, there, here)
            if rule is not None and rule.kind == CORRUPTED and ring._stream is not None:
                with torch.cuda.stream(ring._stream):  # behind the bytes, on their own stream
                    for part in there:
                        part.fill_(0xFF)  # in every float format no number
                    slot.copied.record(ring._stream)  # type: ignore[union-attr]

        def layer(source: StoredChunks, layer: int) -> Any:
            rule = self._at_layers(range(layer, layer + 1))
            found = real_layer(source, layer)
            if rule is not None and rule.kind == CORRUPTED:
                found.k.fill_(float("nan"))
            return found

        def lay(source: StoredChunks, layer: int, keys: Tensor, values: Tensor) -> None:
            rule = self._at_layers(range(layer, layer + 1))
            real_lay(source, layer, keys, values)
            if rule is not None and rule.kind == CORRUPTED:
                keys.fill_(float("nan"))

        for owner, name, call in (
            (Ring, "copy", copy), (StoredChunks, "layer", layer), (StoredChunks, "lay", lay),
        ):  # fmt: skip
            setattr(owner, name, call)

    def _hook_links(self) -> None:
        """Off a GPU bytes leave on a thread as well, so that the same things can go wrong."""
        open_real = offload.open_link

        def open_link(device: torch.device) -> OffloadLink:
            link = open_real(device) or HostLink()
            return _FaultyLink(link, self._stumble)

        offload.open_link = open_link

    # ---- what goes wrong

    def _at_layers(self, layers: range, stream: Any = None) -> FaultRule | None:
        if 0 in layers:
            return self._stumble(LOAD_FIRST, stream)
        if self._middle in layers:
            return self._stumble(LOAD_MIDDLE, stream)
        return None

    def _stumble(self, op: str, stream: Any = None) -> FaultRule | None:
        if self._is_gone:
            raise RuntimeError(LOST)
        rule = self.strikes.strike(op)
        if rule is None:
            return None
        self.struck.set()
        match rule.kind:
            case "slow":
                self.dawdle(rule.delay_s, stream)
            case "hang":
                self.strikes.hang()
            case "error":
                raise RuntimeError(LOST)
            case "gone and back":
                self._is_gone = True
                raise RuntimeError(LOST)
            case "out of device memory":
                raise torch.OutOfMemoryError(NO_MEMORY)
            case "dead thread":
                raise SystemExit(3)
        return rule

    def dawdle(self, seconds: float, stream: Any = None) -> None:
        """The device spins: whatever comes behind it on the stream waits."""
        if not self.on_gpu:
            time.sleep(seconds)
            return
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))  # type: ignore[no-untyped-call]


class HostLink:
    """Carries bytes from one part of host memory to another. See OffloadLink."""

    def mark(self) -> object:
        return None

    def carry(self, source: Tensor, home: Tensor, behind: object) -> None:
        home.copy_(source)


class _FaultyLink:
    """Stumbles where bytes leave the device."""

    def __init__(self, link: OffloadLink, stumble: Callable[..., FaultRule | None]) -> None:
        self._link = link
        self._stumble = stumble

    def mark(self) -> object:
        return self._link.mark()

    def carry(self, source: Tensor, home: Tensor, behind: object) -> None:
        stream = self._link._stream if isinstance(self._link, CudaLink) else None
        rule = self._stumble(SAVE, stream)
        self._link.carry(source, home, behind)
        if rule is not None and rule.kind == CORRUPTED:
            home.fill_(0xFF)


@contextmanager
def no_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """The rest of the device's memory is somebody else's. Gives how often it was wanted since."""
    ballast: list[Tensor] = []
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    size = 1 << 36
    while size >= 1 << 12:
        try:
            ballast.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2

    def wanted() -> int:
        return int(torch.cuda.memory_stats(device)["num_ooms"])

    before = wanted()
    try:
        yield lambda: wanted() - before
    finally:
        ballast.clear()
        torch.cuda.empty_cache()
