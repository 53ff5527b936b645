"""Attention in C: the twin of attention.py for float32 on a CPU, keys that lie in position order.

What a row gets does not depend on the rows beside it, nor on the threads, to the last bit.

Shapes: R rows, N keys, Hq query heads, Hk KV heads, D head dim.
"""

import torch
from torch import Tensor

from kvweave.kernels.native.fields import AttentionFields, HeldFields
from kvweave.kernels.native.library import CompiledLibrary


def attend_row(
    library: CompiledLibrary, q: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """[1, Hq, D]: one row of queries over all of keys and values [N, Hk, D]."""
    num_keys, kv_heads, dim = keys.shape
    if values.shape != keys.shape or q.shape[2] != dim or q.shape[1] % kv_heads or len(q) != 1:
        raise ValueError(f"{q.shape} is no row over keys of {keys.shape}, values of {values.shape}")
    q = q.contiguous()
    out = torch.empty(q.shape)
    failed = library.attend_row(
        q.data_ptr(), keys.data_ptr(), keys.stride(0), keys.stride(1), values.data_ptr(),
        values.stride(0), values.stride(1), out.data_ptr(), num_keys, kv_heads,
        q.shape[1] // kv_heads, dim, scale, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for attention over {num_keys} keys")
    return out


def attend_rows(
    library: CompiledLibrary,
    q: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
) -> Tensor:
    """[R, Hq, D]: rows at `positions` [R], ascending, each over the keys up to its own."""
    num_keys, kv_heads, dim = keys.shape
    num_rows, num_heads = q.shape[:2]
    last = int(positions[-1])
    if values.shape != keys.shape or q.shape[2] != dim or num_heads % kv_heads:
        raise ValueError(f"{q.shape} are no rows over keys of {keys.shape}, {values.shape}")
    if positions.shape != (num_rows,) or not 0 <= int(positions[0]) <= last < num_keys:
        raise ValueError(f"{num_rows} rows up to position {last} do not fit {num_keys} keys")
    positions = positions.to(torch.int64).contiguous()
    out = torch.empty(q.shape)
    held = HeldFields(
        keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1), None, 0,
    )  # fmt: skip
    fields = AttentionFields(
        q.data_ptr(), q.stride(0), q.stride(1), positions.data_ptr(), held, out.data_ptr(),
        num_rows, kv_heads, num_heads // kv_heads, dim, scale,
    )  # fmt: skip
    library.attend_rows(fields, torch.get_num_threads())
    return out
