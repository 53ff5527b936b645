"""RMS norm over the last axis.

Computed in float32 whatever the input is, and rounded before the weight is applied, as the
checkpoints were trained.
"""

import torch
from torch import Tensor

from kvweave.kernels.dispatch import compiled, has_kernels
from kvweave.kernels.native import elementwise as in_c


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x [..., E] divided by its root mean square, times weight [E].

    Written into `out` if given, which may be x itself.
    """
    if has_kernels(x) and x.dim() in (2, 3) and x.stride(-1) == 1:
        from kvweave.kernels.gpu import elementwise

        return elementwise.rms_norm(x, weight, eps, out)
    if x.dim() == 2 and (library := compiled(x, weight, x if out is None else out)) is not None:
        return in_c.rms_norm(library, x, weight, eps, out)
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # one pass, nothing in between
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
    y = torch.mul(wide, scale).to(x.dtype).mul_(weight)
    return y if out is None else out.copy_(y)
