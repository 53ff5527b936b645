"""Column scores of all heads in a few launches: what kernels/column_scores.py defines, for GPUs.

There a loop over heads and chunks costs more than the work in it. Logits of some rows of all heads
are held at once, as many as fit a bound.

Shapes: as in column_scores.py; M tokens of the longest chunk, C chunks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.kernels.host import on_device

HELD = 128 << 20  # logits held at a time


def batched_scores(
    q: Tensor,
    keys: Tensor,
    others: Sequence[tuple[Tensor, Tensor | None]],
    chunks: Sequence[tuple[int, int]] | None,
    rows: str,
) -> Tensor:
    """Attention [Hq, N] that each of `keys` [N, Hk, D] gets, rows put together as `rows` says.

    `chunks` gives each its own softmax; None: one over the columns and `others`.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    columns = keys.float().permute(1, 2, 0)  # [Hk, D, N]
    more = [(k.float().permute(1, 2, 0), seen) for k, seen in others]
    asking = q.float() * head_dim**-0.5
    asking = asking.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [Hk, G, Q, D]
    group = num_heads // num_kv_heads
    step = max(1, HELD // (num_heads * max(1, len(keys))))
    best = torch.zeros(num_kv_heads, group, len(keys), dtype=torch.float32, device=q.device)
    for start in range(0, num_rows, step):
        block = slice(start, start + step)
        mine = asking[:, :, block]
        flat = mine.reshape(num_kv_heads, -1, head_dim)
        logits = torch.bmm(flat, columns).view(*mine.shape[:3], -1)  # [Hk, G, rows, N]
        if chunks is not None:
            logits = _softmax_each(logits, chunks)
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
