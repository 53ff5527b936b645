"""Attention of rows over the keys of their own sequence, by position.

One operator serves full prefill, chunked prefill, sparse recomputation and decode, because all four
are the same question: a row at position p sees the keys at positions <= p. Rows may be any subset
of a sequence; keys lie in position order. There is no other notion of causality, so a recomputed
row in the middle of a prompt can never see what stands behind it.

Shapes: R rows of all sequences, N keys of one sequence, Hq query heads, Hk KV heads, D head dim.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.kernels.dispatch import find_compiled, has_kernels
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.operators import attend_rows
from kvweave.kernels.scattered import attend_scattered
from kvweave.kernels.types import Segment

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Rows per block. Keys beyond the last row of a block are never touched, so small blocks skip more
# of the masked triangle; large ones pay less per call. 128-512 are within 10 % of each other:
# 2-core x86-64, 3,000 tokens, 9/3 heads of 64, float32 (bench/prefill.py, 2026-11-15).
BLOCK_ROWS = 256
# Scattered rows: a block spans many positions, and most of its keys are masked for its first row.
# Smaller blocks waste less.
SPARSE_BLOCK_ROWS = 64


def attend(
    q: Tensor,
    positions: Tensor,
    segments: Sequence[Segment],
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention output [R, Hq, D] for rotated queries q [R, Hq, D] at `positions` [R].

    `positions` lie in host memory and ascend within a segment. Every row must see at least one key.
    Written into `out` [R, Hq, D] if given.
    """
    if kernels_fit(q, [x for s in segments for x in (s.keys, s.values)]):
        from kvweave.kernels.gpu.attention import attend_segments

        return attend_segments(q, positions, segments, scale, out)
    attended = attend_reference(q, positions, segments, scale)
    return attended if out is None else out.copy_(attended)


def kernels_fit(q: Tensor, held: Sequence[Tensor]) -> bool:
    """Whether the GPU kernels take these queries over these keys and values."""
    return (
        has_kernels(q)
        and q.dtype in KERNEL_DTYPES
        and all(x.dtype == q.dtype and x.stride(-1) == 1 for x in held)
    )


def attend_reference(
    q: Tensor, positions: Tensor, segments: Sequence[Segment], scale: float | None = None
) -> Tensor:
    """The definition in plain PyTorch: what a CPU runs and what GPU kernels are compared with. On a
    CPU with compiled kernels these do the work; they are held to the definition by their tests."""
    parts: list[Tensor] = []
    for segment in segments:
        at = slice(segment.start, segment.end)
        if (library := _compiled_for(q, segment)) is not None:
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            keys, values = segment.keys, segment.values
            parts.append(attend_rows(library, q[at], positions[at], keys, values, factor))
            continue
        if segment.end - segment.start == 1 and segment.key_positions is None:  # decode
            parts.append(_sdpa(q[at], segment, int(positions[segment.start]) + 1, scale))
            continue
        before = _rows_before(positions, segment)
        if before is not None:
            rows = q[segment.start : segment.end]
            if before:
                rows = F.pad(rows, (0, 0, 0, 0, before, 0))
            parts.append(_sdpa(rows, segment, len(rows), scale, causal=True)[before:])
            continue
        block = _block_rows(positions, segment)
        if _are_scattered(q, segment, block):
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            done = attend_scattered(q[at], positions[at], segment.keys, segment.values, factor)
            if done is not None:
                parts.append(done)
                continue
        for start in range(segment.start, segment.end, block):
            end = min(start + block, segment.end)
            parts.append(_attend_block(q[start:end], positions[start:end], segment, scale))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty_like(q)


def _attend_block(q: Tensor, positions: Tensor, segment: Segment, scale: float | None) -> Tensor:
    first, last = int(positions[0]), int(positions[-1])
    if segment.key_positions is None:
        num_keys, num_free = last + 1, first + 1
    else:  # compact keys: count those at or before the first and the last row
        bounds = torch.tensor([last, first])
        counts = torch.searchsorted(segment.key_positions.cpu(), bounds, right=True)
        num_keys, num_free = (int(n) for n in counts)
    assert num_free > 0, "a row sees no key at all"
    mask = None
    if num_free < num_keys:  # the edge: keys that some rows of the block see and others do not
        row_at = positions.to(q.device, non_blocking=True)[:, None]
        if segment.key_positions is None:
            key_at = torch.arange(num_free, num_keys, device=q.device)
        else:
            key_at = segment.key_positions[num_free:num_keys].to(q.device)
        mask = torch.zeros(len(q), num_keys, dtype=q.dtype, device=q.device)
        mask[:, num_free:].masked_fill_(key_at > row_at, float("-inf"))
    return _sdpa(q, segment, num_keys, scale, mask)


def _compiled_for(q: Tensor, segment: Segment) -> CompiledLibrary | None:
    """The compiled kernels, where they take all rows of a segment at once."""
    if segment.end <= segment.start or segment.key_positions is not None:
        return None
    return compiled_for(q, segment.keys, segment.values)


def compiled_for(q: Tensor, keys: Tensor, values: Tensor) -> CompiledLibrary | None:
    """The compiled kernels, where they take these queries over these keys and values."""
    library = find_compiled(q, keys, values)
    return library if library is not None and q.shape[-1] <= library.most_dim else None


def _block_rows(positions: Tensor, segment: Segment) -> int:
    """Rows that are looked at together."""
    if segment.end <= segment.start:
        return BLOCK_ROWS
    spanned = int(positions[segment.end - 1]) - int(positions[segment.start]) + 1
    return SPARSE_BLOCK_ROWS if spanned > 2 * (segment.end - segment.start) else BLOCK_ROWS


def _are_scattered(q: Tensor, segment: Segment, block: int) -> bool:
    """Rows far apart, or so few that their keys outweigh them; where plain products do better."""
    num_rows = segment.end - segment.start
    return (
        (block == SPARSE_BLOCK_ROWS or 1 < num_rows <= SPARSE_BLOCK_ROWS)
        and segment.key_positions is None
        and q.device.type == "cpu"
        and q.dtype == torch.float32
    )


def _rows_before(positions: Tensor, segment: Segment) -> int | None:
    """How many rows are missing for plain causal attention, which has no mask to build.

    Rows without a gap that start near position 0 are filled up to it: the few extra rows cost less
    than a mask over all of them. None: not such rows.
    """
    num_rows = segment.end - segment.start
    if num_rows <= 1 or segment.key_positions is not None:
        return None
    first, last = int(positions[segment.start]), int(positions[segment.end - 1])
    return first if last - first == num_rows - 1 and 4 * first <= num_rows else None


def _sdpa(
    q: Tensor,
    segment: Segment,
    num_keys: int,
    scale: float | None,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """Rows over the first `num_keys` keys: all, or causal from the top left, or as masked."""
    if len(q) == 1 and mask is None:
        keys, values = segment.keys[:num_keys], segment.values[:num_keys]
        # heads that share a KV head are as rows of it: a third off for 9/3 heads and 512 keys
        grouped = F.scaled_dot_product_attention(
            q.reshape(1, keys.shape[1], -1, q.shape[-1]),  # [1, Hk, G, D]
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            scale=scale,
        )
        return grouped.reshape(q.shape)
    heads_first = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],  # [1, Hq, rows, D]
        segment.keys[:num_keys].transpose(0, 1)[None],  # [1, Hk, keys, D]
        segment.values[:num_keys].transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=True,
    )
    return heads_first[0].transpose(0, 1)


def attend_grouped(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    """Attention output [B, R, Hq, D] of q [B, R, Hq, D] over keys and values [B, N, Hk, D].

    `seen` [B, R, N] or [R, N] says which keys a row sees; None: all of them.
    """
    num, rows, num_heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    group = num_heads // kv_heads
    # [B, R, Hk, G, D] -> [B, Hk, G * R, D]
    lined = q.view(num, rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    lined = lined.reshape(num, kv_heads, group * rows, head_dim)
    mask = None
    if seen is not None:
        seen = seen.expand(num, rows, seen.shape[-1])
        mask = seen[:, None].repeat(1, 1, group, 1)  # [B, 1, G * R, N]
    o = F.scaled_dot_product_attention(
        lined, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
    )
    o = o.view(num, kv_heads, group, rows, head_dim).permute(0, 3, 1, 2, 4)
    return o.reshape(num, rows, num_heads, head_dim)
