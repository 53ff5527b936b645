"""How much attention each key gets from some rows: column sums of the attention matrix.

The matrix is never held whole: heads of one KV group share their keys and are done together, in
float32, and reduced at once. Where keys count that are no columns, a block takes two passes:
log-sum-exp over the keys that count, then probabilities of the columns that are wanted.

Shapes: Q rows that ask, N columns, U own keys, Hq query heads, Hk KV heads, G = Hq / Hk, D head
dim.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvweave.kernels.dispatch import has_kernels
from kvweave.kernels.host import on_device

HELD = 128 << 20  # logits held at a time on a GPU


def batched_scores(
    q: Tensor,
    keys: Tensor,
    others: Sequence[tuple[Tensor, Tensor | None]],
    chunks: Sequence[tuple[int, int]] | None,
    rows: str,
    step: int | None = None,
) -> Tensor:
    """Attention [Hq, N] that each of `keys` [N, Hk, D] gets, rows put together as `rows` says.

    `chunks` gives each its own softmax; None: one over the columns and `others`. `step` rows are
    done together; None: as many as HELD logits allow.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    columns = keys.float().permute(1, 2, 0)  # [Hk, D, N]
    more = [(k.float().permute(1, 2, 0), seen) for k, seen in others]
    asking = q.float() * head_dim**-0.5
    asking = asking.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [Hk, G, Q, D]
    group = num_heads // num_kv_heads
    step = step or max(1, HELD // (num_heads * max(1, len(keys))))
    best = torch.zeros(num_kv_heads, group, len(keys), dtype=torch.float32, device=q.device)
    for start in range(0, num_rows, step):
        block = slice(start, start + step)
        mine = asking[:, :, block]
        flat = mine.reshape(num_kv_heads, -1, head_dim)
        logits = torch.bmm(flat, columns).view(*mine.shape[:3], -1)  # [Hk, G, rows, N]
        if chunks is not None:
            logits = _softmax_each(logits, chunks)
        elif not more:
            logits = logits.softmax(-1)
        else:
            total = logits.logsumexp(-1, keepdim=True)
            for extra, seen in more:
                added = torch.bmm(flat, extra).view(*mine.shape[:3], -1)
                if seen is not None:
                    added = added.masked_fill(~seen[block], float("-inf"))
                total = torch.logaddexp(total, added.logsumexp(-1, keepdim=True))
            logits = logits.sub_(total).exp_()
        if rows == "max":
            best = torch.maximum(best, logits.amax(2))
        else:
            best += logits.sum(2)
    if rows == "mean":
        best /= num_rows
    return best.flatten(0, 1)


def _softmax_each(logits: Tensor, chunks: Sequence[tuple[int, int]]) -> Tensor:
    """Softmax over every chunk [start, end) of the last axis by itself."""
    lengths = [end - start for start, end in chunks]
    longest = max(lengths)
    folded = (*logits.shape[:-1], len(chunks), longest)
    if min(lengths) == longest and len(chunks) * longest == logits.shape[-1]:
        return logits.view(folded).softmax(-1).flatten(-2)
    starts = torch.tensor([start for start, _ in chunks])
    nth = torch.arange(longest)
    seen = nth < torch.tensor(lengths)[:, None]  # [C, M]
    at = (starts[:, None] + nth)[seen]  # columns, in the order of the chunks
    places = on_device(torch.nonzero(seen.flatten())[:, 0], logits.device)
    at = on_device(at, logits.device)
    padded = logits.new_full((*logits.shape[:-1], len(chunks) * longest), float("-inf"))
    padded[..., places] = logits[..., at]
    each = padded.view(folded).softmax(-1).flatten(-2)
    out = torch.zeros_like(logits)
    out[..., at] = each[..., places]
    return out


Reduce = Literal["sum", "mean", "max"]
# Which keys share the softmax: everything a row sees, the columns alone, or each chunk by itself.
Normaliser = Literal["full", "context", "chunk"]
BLOCK_ROWS = 256


def column_scores(
    q: Tensor,
    keys: Tensor,
    *,
    others: Sequence[tuple[Tensor, Tensor | None]] = (),
    chunks: Sequence[tuple[int, int]] = (),
    normaliser: Normaliser = "full",
    rows: Reduce = "sum",
    heads: Reduce = "sum",
) -> Tensor:
    """Attention that each of `keys` [N, Hk, D] gets from rotated queries q [Q, Hq, D]: [N] float32.

    Every row sees every column. `others` are keys that take part in the softmax of "full" without
    being columns: (keys [U, Hk, D], mask [Q, U] or None for all seen). `chunks` are the columns'
    bounds [start, end), for "chunk". NaN anywhere is an error of the caller's.
    """
    beside = others if normaliser == "full" else ()
    if _kernels_can(q, keys) and normaliser != "chunk" and len(q) and len(keys):
        found = _by_kernel([q], [keys], [([k], seen) for k, seen in beside], rows)
        return reduce(found[0], heads, dim=0)
    each = chunks if normaliser == "chunk" else None
    if q.is_cuda:  # a loop over heads would order more than it computes
        return reduce(batched_scores(q, keys, beside, each, rows), heads, dim=0)
    group, per_head = q.shape[1] // keys.shape[1], []  # [G, N] of each KV head
    for i in range(keys.shape[1]):
        at = slice(i, i + 1)
        own = [(k[:, at], seen) for k, seen in beside]
        mine = q[:, i * group : (i + 1) * group]
        per_head.append(batched_scores(mine, keys[:, at], own, each, rows, BLOCK_ROWS))
    return reduce(torch.cat(per_head), heads, dim=0)


def layer_column_scores(
    q: Sequence[Tensor],
    keys: Sequence[Tensor],
    *,
    others: Sequence[tuple[Sequence[Tensor], Tensor | None]] = (),
    chunks: Sequence[tuple[int, int]] = (),
    normaliser: Normaliser = "full",
    rows: Reduce = "sum",
    heads: Reduce = "sum",
) -> Tensor:
    """`column_scores` of several layers, [S, N] float32: on a GPU in as many orders as one takes.

    Queries, keys and each of `others` are of every layer; a mask is the same for all of them.
    """
    beside = others if normaliser == "full" else ()
    alike = len({(k.shape, k.stride(), k.dtype) for k in keys}) == 1
    if alike and _kernels_can(q[0], keys[0]) and normaliser != "chunk" and q[0].numel():
        return reduce(_by_kernel(q, keys, beside, rows), heads, dim=1)
    found = []
    for i, (asking, held) in enumerate(zip(q, keys, strict=True)):
        own = [(more[i], seen) for more, seen in beside]
        found.append(
            column_scores(
                asking, held, others=own, chunks=chunks, normaliser=normaliser, rows=rows,
                heads=heads,
            )
        )  # fmt: skip
    return torch.stack(found)


def causal_column_mass(q: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
    """Attention that each of `keys` [N, Hk, D] gets from rows at `positions`: [N] float32.

    Key j stands at position j; a row sees keys at or before it. Summed over rows and heads.
    """
    if _kernels_can(q, keys) and len(q):
        from kvweave.kernels.gpu.columns import column_reduce, row_lse

        limits = on_device((positions + 1).to(torch.int32), q.device)
        lse = row_lse(q, keys, limits)
        return column_reduce(q, keys, lse, "sum", limits).sum(0)
    num_heads, head_dim = q.shape[1:]
    group = num_heads // keys.shape[1]
    mass = torch.zeros(len(keys), dtype=torch.float32, device=q.device)
    at = torch.arange(len(keys), device=q.device)
    for start in range(0, len(q), BLOCK_ROWS):
        block = q[start : start + BLOCK_ROWS]
        rows = positions[start : start + BLOCK_ROWS].to(q.device)
        hidden = at > rows[:, None]  # [rows, N]
        for kv_head in range(keys.shape[1]):
            mine = block[:, kv_head * group : (kv_head + 1) * group].transpose(0, 1).float()
            logits = torch.matmul(mine, keys[:, kv_head].float().T) * head_dim**-0.5
            mass += logits.masked_fill_(hidden, float("-inf")).softmax(-1).sum((0, 1))
    return mass


def _kernels_can(q: Tensor, keys: Tensor) -> bool:
    return has_kernels(q) and q.dtype == keys.dtype and q.stride(-1) == keys.stride(-1) == 1


def _by_kernel(
    q: Sequence[Tensor],
    keys: Sequence[Tensor],
    others: Sequence[tuple[Sequence[Tensor], Tensor | None]],
    rows: Reduce,
) -> Tensor:
    """[S, Hq, N] of some layers, for `column_scores`. `others` are few (the question, the
    preamble): plain products."""
    from kvweave.kernels.gpu.columns import Stack, columns_reduce, merge_parts, split_lse
    from kvweave.kernels.gpu.tiles import LOG2_E

    asking, stack = _stack(q), Stack.from_layers(keys)
    total = split_lse(asking, stack)  # [parts, S, Hq, Q], to the base 2
    if others:
        total = merge_parts(total)
        layers, num_rows, heads, dim = asking.shape
        kv_heads = keys[0].shape[1]
        wide = asking.float().view(layers, num_rows, kv_heads, heads // kv_heads, dim)
        for held, seen in others:
            extra = torch.einsum("sqhgd,suhd->shgqu", wide, _stack(held).float()) * dim**-0.5
            if seen is not None:
                extra = extra.masked_fill(~seen, float("-inf"))
            found = extra.flatten(1, 2).logsumexp(-1)  # [S, Hq, Q]
            total = torch.logaddexp2(total, found * LOG2_E)
        total = total[None]
    found = columns_reduce(asking, stack, total, "max" if rows == "max" else "sum")
    return found / asking.shape[1] if rows == "mean" else found


def _stack(parts: Sequence[Tensor]) -> Tensor:
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))


def reduce(x: Tensor, how: Reduce, dim: int) -> Tensor:
    """Sum, mean or maximum over one dimension."""
    if how == "max":
        return x.amax(dim)
    return x.sum(dim) if how == "sum" else x.mean(dim)
