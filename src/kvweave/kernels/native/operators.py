"""Operators in C, for float32 on a CPU: products with weights, attention, RMS norm, the gate of the
MLP, the rotation.

What a row gets does not depend on the rows beside it, nor on the threads, nor on where its keys
lie, to the last bit. A call takes a few microseconds where PyTorch's operators take that for each
of their steps: a decode step has hundreds of them.

Shapes: R rows, N keys, H heads, Hq query heads, Hk KV heads, D head dim, E hidden dim, I inner
dims or dims of an input, O output dims.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.kernels.native.fields import AttentionFields, HeldFields, MatrixFields
from kvweave.kernels.native.library import CompiledLibrary


def attend_rows(
    library: CompiledLibrary,
    q: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    pieces: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """[R, Hq, D]: rows at `positions` [R], ascending, each over the keys up to its own.

    `pieces`: runs [start, end) of keys and values [N, Hk, D] in position order; None: all of them.
    """
    num_keys, kv_heads, dim = keys.shape
    num_rows, num_heads = q.shape[:2]
    last = int(positions[-1])
    if values.shape != keys.shape or q.shape[2] != dim or num_heads % kv_heads:
        raise ValueError(f"{q.shape} are no rows over keys of {keys.shape}, {values.shape}")
    if pieces is not None:
        if not all(0 <= start <= end <= num_keys for start, end in pieces):
            raise ValueError(f"pieces {pieces} are not in {num_keys} slots")
        num_keys = sum(end - start for start, end in pieces)
    if positions.shape != (num_rows,) or not 0 <= int(positions[0]) <= last < num_keys:
        raise ValueError(f"{num_rows} rows up to position {last} do not fit {num_keys} keys")
    if q.stride(1) != dim or q.stride(2) != 1:
        q = q.contiguous()
    positions = positions.to(torch.int64).contiguous()
    out = torch.empty(q.shape)
    at, count = 0, 0
    if pieces is not None:  # slots and how many, in memory that lives until the call is over
        slots = torch.tensor([(start, end - start) for start, end in pieces])
        at, count = slots.data_ptr(), len(pieces)
    held = HeldFields(
        keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1), at, count,
    )  # fmt: skip
    fields = AttentionFields(
        q.data_ptr(), q.stride(0), q.stride(1), positions.data_ptr(), held, out.data_ptr(),
        num_heads * dim, num_rows, kv_heads, num_heads // kv_heads, dim, scale,
    )  # fmt: skip
    if library.attend_rows(fields, torch.get_num_threads()):
        raise MemoryError(f"no memory for attention over {num_keys} keys")
    return out


def multiply_floats(
    library: CompiledLibrary,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    *,
    add: bool,
) -> Tensor:
    """Write x [R, I] times the weight [O, I], plus the bias [O], to y [R, O], or add it to y."""
    out_dim, in_dim = weight.shape
    if x.shape[1:] != (in_dim,) or y.shape != (len(x), out_dim):
        raise ValueError(f"[R, {in_dim}] to [R, {out_dim}], not {x.shape}, {y.shape}")
    if not weight.is_contiguous() or (bias is not None and bias.shape != (out_dim,)):
        raise ValueError(f"a weight of {weight.shape} in one piece and a bias of as many channels")
    at = 0 if bias is None else bias.data_ptr()
    fields = MatrixFields(0, weight.data_ptr(), at, in_dim, out_dim)
    failed = library.multiply_floats(
        fields, x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), len(x), add,
        torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory to multiply {len(x)} rows of {in_dim}")
    return y


def rms_norm(
    library: CompiledLibrary, x: Tensor, weight: Tensor, eps: float, out: Tensor | None
) -> Tensor:
    """Compute kvweave.kernels.elementwise.rms_norm, of x [R, E] whose dims lie side by side."""
    y = torch.empty(x.shape) if out is None else out
    if y.shape != x.shape or weight.shape != x.shape[1:]:
        raise ValueError(f"a weight of {weight.shape} and {y.shape} are not for rows of {x.shape}")
    library.rms_norm(
        x.data_ptr(), x.stride(0), weight.data_ptr(), eps, y.data_ptr(), y.stride(0), *x.shape,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def silu_mul(library: CompiledLibrary, gate_up: Tensor) -> Tensor:
    """Compute kvweave.kernels.elementwise.silu_mul, of [R, 2 I] whose dims lie side by side."""
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    threads = torch.get_num_threads()
    library.silu_mul(gate_up.data_ptr(), gate_up.stride(0), num_rows, inner, threads)
    return gate_up[:, :inner]


def rotate(library: CompiledLibrary, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Compute kvweave.kernels.rope.rotate. Dims of x [R, H, D], cos, sin, out lie side by side."""
    num_rows, num_heads, dim = x.shape
    per_row, per_head, half = cos.shape
    if (
        out.shape != x.shape
        or cos.shape != sin.shape
        or cos.stride() != sin.stride()
        or per_row not in (1, num_rows)
        or per_head not in (1, num_heads)
        or 2 * half > dim
    ):
        raise ValueError(f"angles of {cos.shape} do not turn {x.shape} into {out.shape}")
    library.rotate(
        x.data_ptr(), x.stride(0), x.stride(1), cos.data_ptr(), sin.data_ptr(),
        0 if per_row == 1 else cos.stride(0), 0 if per_head == 1 else cos.stride(1),
        out.data_ptr(), out.stride(0), out.stride(1),
        num_rows, num_heads, dim, half, torch.get_num_threads(),
    )  # fmt: skip
    return out
