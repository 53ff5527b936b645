"""Small tables on their way to a device, without waiting for it."""

from collections.abc import Sequence

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
    table = torch.zeros(sum(sizes), dtype=torch.int32)
    for part, room in zip(parts, torch.split(table, sizes), strict=True):
        room[: part.nbytes // 4] = part.contiguous().view(-1).view(torch.int32)
    sent = torch.split(on_device(table, device), sizes)
    return [
        room[: part.nbytes // 4].view(part.dtype).view(part.shape)
        for part, room in zip(parts, sent, strict=True)
    ]
