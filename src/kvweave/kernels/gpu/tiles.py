"""What the launches of attention-like kernels share: numbers of a tile in the matrix unit."""

import torch
import triton
from torch import Tensor

LOG2_E = 1.4426950408889634  # softmax is computed to the base 2


def tile_width(head_dim: int) -> int:
    """Channels of a tile in the matrix unit."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def precision(q: Tensor) -> str:
    """How products of a tile are computed; only float32 has a choice, and takes the exact one."""
    return "ieee" if q.dtype == torch.float32 else "tf32"
