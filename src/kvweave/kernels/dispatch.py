"""What an operator runs: a GPU kernel, or the definition in plain PyTorch.

Kernels need a CUDA device and Triton. Triton comes with the CUDA builds of PyTorch; where it is
missing the definition runs on the GPU as it does on a CPU: slower, never different.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels in `kernels/gpu` can work on x."""
    return x.is_cuda and has_triton()


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def is_hopper(device: torch.device) -> bool:
    """H100, H200: the matrix units and the copy engine that `gpu/hopper.py` is written for."""
    return torch.cuda.get_device_capability(device) == (9, 0)
