"""What an operator runs: a GPU kernel, a compiled one on a CPU, or the definition in plain PyTorch.

Compiled kernels are there where a model of some size was loaded on a CPU (model/load.py): compiling
takes a second, once. GPU kernels need a CUDA device and Triton, which comes with the CUDA builds of
PyTorch; where it is missing the definition runs on the GPU as it does on a CPU: slower, never
different.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.loading import loaded_library


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels in `kernels/gpu` can work on x."""
    return x.is_cuda and has_triton()


def find_compiled(*tensors: Tensor) -> CompiledLibrary | None:
    """The kernels in `kernels/native`, if they are loaded and can work on all of these: float32 on
    a CPU, last dims side by side."""
    library = loaded_library()
    if library is None:
        return None
    for x in tensors:
        if x.dtype != torch.float32 or not x.is_cpu or x.stride(-1) != 1:
            return None
    return library


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def is_hopper(device: torch.device) -> bool:
    """H100, H200: the matrix units and the copy engine that `gpu/hopper.py` is written for."""
    return torch.cuda.get_device_capability(device) == (9, 0)
