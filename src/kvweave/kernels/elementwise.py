"""Between the products of a layer: RMS norm and the gate of the MLP. The rotation is in `rope.py`.

Shapes: R rows, E hidden dim, I inner dims.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.kernels.dispatch import find_compiled, has_kernels
from kvweave.kernels.native import operators as in_c


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x [..., E] divided by its root mean square, times weight [E].

    Computed in float32 whatever x is, and rounded before the weight is applied, as the checkpoints
    were trained. Written into `out` if given, which may be x itself.
    """
    if has_kernels(x) and x.dim() in (2, 3) and x.stride(-1) == 1:
        from kvweave.kernels.gpu import elementwise

        return elementwise.rms_norm(x, weight, eps, out)
    if (library := find_compiled(x, weight, x if out is None else out)) is not None:
        if x.dim() == 2:
            return in_c.rms_norm(library, x, weight, eps, out)
        y = in_c.rms_norm(library, x.flatten(0, -2), weight, eps, None).view(x.shape)
        return y if out is None else out.copy_(y)
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # one pass, nothing in between
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
    y = torch.mul(wide, scale).to(x.dtype).mul_(weight)
    return y if out is None else out.copy_(y)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, [R, I], of gate_up [R, 2 I]: gates in front, what they let through behind.

    Overwrites the gates and returns that half: the widest tensor of a layer is not copied.
    """
    if has_kernels(gate_up) and gate_up.stride(1) == 1:
        from kvweave.kernels.gpu import elementwise

        return elementwise.silu_mul(gate_up)
    if gate_up.dim() == 2 and (library := find_compiled(gate_up)) is not None:
        return in_c.silu_mul(library, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)
