"""The gate of an MLP: silu(gate) · up, in place.

Shapes: R rows, I inner dims.
"""

import torch.nn.functional as F
from torch import Tensor

from kvweave.kernels.dispatch import compiled, has_kernels
from kvweave.kernels.native import elementwise as in_c


def silu_mul(gate_up: Tensor) -> Tensor:
    """[R, I] of gate_up [R, 2 I]: gates in front, what they let through behind.

    Overwrites the gates and returns that half: the widest tensor of a layer is not copied.
    """
    if has_kernels(gate_up) and gate_up.stride(1) == 1:
        from kvweave.kernels.gpu import elementwise

        return elementwise.silu_mul(gate_up)
    if gate_up.dim() == 2 and (library := compiled(gate_up)) is not None:
        return in_c.silu_mul(library, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)
