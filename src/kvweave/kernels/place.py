"""Rotate-and-place: chunk KV from a staging buffer to where its tokens stand in this prompt.

Keys are stored before RoPE. Here they are turned to their positions in float32, rounded once, and
written with the values into the request's KV: one read and one write of every byte.

Shapes: N stored tokens, T rows of the request's KV, Hk KV heads, D head dim, r rotary dims.
"""

import torch
from torch import Tensor

from kvweave.kernels.dispatch import has_kernels


def place(
    stored_k: Tensor,
    stored_v: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    attention_factor: float,
    out_k: Tensor,
    out_v: Tensor,
    slots: Tensor | None = None,
) -> None:
    """Write stored_k, stored_v [N, Hk, D] into out_k, out_v [T, Hk, D], keys turned.

    Token n stands at positions[n] (on the device) and goes to row slots[n], or to row positions[n]
    where `slots` is None. KV in pages is given as one flat buffer [pages * page, Hk, D] with slots.
    `inv_freq` [r/2] is float32; `attention_factor` is YaRN's. No two tokens may share a row.
    """
    if has_kernels(stored_k):
        from kvweave.kernels.gpu.place import place_rows

        place_rows(stored_k, stored_v, positions, inv_freq, attention_factor, out_k, out_v, slots)
    else:
        place_reference(
            stored_k, stored_v, positions, inv_freq, attention_factor, out_k, out_v, slots
        )


def place_reference(
    stored_k: Tensor,
    stored_v: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    attention_factor: float,
    out_k: Tensor,
    out_v: Tensor,
    slots: Tensor | None = None,
) -> None:
    """The definition of `place`."""
    rows = (positions if slots is None else slots).long()
    out_k[rows] = turn(stored_k, positions, inv_freq, attention_factor).to(out_k.dtype)
    out_v[rows] = stored_v.to(out_v.dtype)


def turn(k: Tensor, positions: Tensor, inv_freq: Tensor, attention_factor: float) -> Tensor:
    """Keys [N, Hk, D] turned to `positions` [N], in float32."""
    half = len(inv_freq)
    phase = positions.to(torch.float32)[:, None, None] * inv_freq  # [N, 1, r/2]
    cos, sin = phase.cos() * attention_factor, phase.sin() * attention_factor
    wide = k.float()
    k1, k2, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((k1 * cos - k2 * sin, k2 * cos + k1 * sin, rest), dim=-1)
