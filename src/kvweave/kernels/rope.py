"""Rotary position embedding: turn keys and queries to their positions.

Rotation is linear and additive in the position, which is what makes chunk KV position-free: a key
stored before rotation is turned once, to wherever its chunk stands in this prompt.

Angles are always float32: in bf16 a position beyond a few hundred is already off.

Shapes: R rows, H heads, D head dim, r rotary dims (r <= D; the rest passes through).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.kernels.dispatch import find_compiled, has_kernels
from kvweave.kernels.native import operators as in_c


class Angles(NamedTuple):
    """Cosines and sines of one set of rows; made once per pass, used by every layer."""

    cos: Tensor  # [R, 1, r/2] in the dtype of the keys; [R, H, r/2] from `per_head`
    sin: Tensor


Turn = Callable[[Tensor], Angles]  # of positions [R]: a rotation alone, without YaRN's factor


def make_angles(positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> Angles:
    """Angles for `positions` [R] under `inv_freq` [r/2] (float32).

    `scale` is the attention factor that YaRN puts into cosine and sine; 1.0 for the others.
    """
    phase = positions.to(torch.float32)[:, None, None] * inv_freq  # [R, 1, r/2]
    cos, sin = phase.cos(), phase.sin()
    if scale != 1.0:  # each product is one more order to a device
        cos, sin = cos * scale, sin * scale
    return Angles(cos.to(dtype), sin.to(dtype))


def per_head(angles: Angles, num_heads: int) -> Angles:
    """Return the angles, on a CPU laid out once per head: [R, H, r/2].

    For many rows that are turned layer after layer. Without broadcasting between them, rows and
    heads are one loop to the CPU, a quarter faster; a GPU would only read more.
    """
    if angles.cos.device.type != "cpu":
        return angles
    cos, sin = (x.expand(-1, num_heads, -1).contiguous() for x in angles)
    return Angles(cos, sin)


def rotate(x: Tensor, angles: Angles, out: Tensor | None = None) -> Tensor:
    """Turn x [R, H, D] by `angles`; pairs are (j, j + r/2), as in the Hugging Face layout.

    Writes into `out` [R, H, D] if given (a slice of a KV buffer saves a copy). `out` must not
    overlap x: the halves are read after the first one is written.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if has_kernels(x) and x.stride(-1) == out.stride(-1) == 1:
        from kvweave.kernels.gpu import elementwise

        return elementwise.rotate(x, angles.cos, angles.sin, out)
    if (library := find_compiled(x, *angles, out)) is not None:
        return in_c.rotate(library, x, *angles, out)
    half = angles.cos.shape[-1]
    x1, x2 = x[..., :half], x[..., half : 2 * half]
    torch.mul(x1, angles.cos, out=out[..., :half])
    out[..., :half].addcmul_(x2, angles.sin, value=-1)
    torch.mul(x2, angles.cos, out=out[..., half : 2 * half])
    out[..., half : 2 * half].addcmul_(x1, angles.sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
