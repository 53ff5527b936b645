"""Dense attention of many sequences of one length, without copying keys for every query head.

Query heads that share a KV head are laid behind each other as rows of it. For batches where every
sequence has its own mask: scoring many trials of one prompt, not serving.

Shapes: B sequences, R rows, N keys, Hq query heads, Hk KV heads, G = Hq / Hk, D head dim.
"""

import torch.nn.functional as F
from torch import Tensor


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
