"""Small tables on their way to a device, without waiting for it."""

from collections.abc import Sequence
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
