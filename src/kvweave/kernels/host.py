"""Small tables on their way to a device, without waiting for it."""

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
