"""Small tables on their way to a device, and back, without waiting for more than they need."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kvweave.kernels.dispatch import has_triton


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`. A plain `.to` makes the host wait for all the GPU has to do."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    if has_triton():
        from kvweave.kernels.gpu.tables import can_fetch, fetch

        if can_fetch(x.nbytes):
            return fetch(x, device)
    return x.pin_memory().to(device, non_blocking=True)


class Returning:
    """A tensor on its way to the host. The device may be given more to do meanwhile: it is waited
    for up to here alone."""

    def __init__(self, x: Tensor) -> None:
        self._host = x
        self._there: torch.cuda.Event | None = None
        if x.device.type == "cuda":
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record(torch.cuda.current_stream(x.device))

    @property
    def is_there(self) -> bool:
        return self._there is None or bool(self._there.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        if self._there is not None:
            self._there.synchronize()
        return self._host


def on_host(x: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
    """A tensor on the host; `meanwhile` is called before it is waited for."""
    returning = Returning(x)
    if meanwhile is not None:
        meanwhile()
    return returning.wait()


ALIGNED = 4  # words of 4 bytes: parts begin where kernels like to read


def together_on_device(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host tensors on `device`, in one piece: sending each takes the host a while. Of any shape, in
    dtypes of 4 or 8 bytes; views of one memory."""
    if device.type != "cuda":
        return [part.to(device) for part in parts]
    sizes = [-(-part.nbytes // (4 * ALIGNED)) * ALIGNED for part in parts]
    starts = [0, *accumulate(sizes)]
    table = np.empty(starts[-1], dtype=np.int32)
    for part, start in zip(parts, starts, strict=False):
        words = part.contiguous().numpy().reshape(-1).view(np.int32)
        table[start : start + len(words)] = words
    sent = on_device(torch.from_numpy(table), device)
    return [
        sent[start : start + part.nbytes // 4].view(part.dtype).view(part.shape)
        for part, start in zip(parts, starts, strict=False)
    ]
