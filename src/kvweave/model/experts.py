"""The routed MLP of mixture-of-experts models.

Rows are grouped by expert, so each expert runs once per batch on its own rows, whatever sequence
they come from.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.model.spec import ExpertSpec
from kvweave.model.weights import ExpertWeights


def routed_mlp(x: Tensor, weights: ExpertWeights, spec: ExpertSpec) -> Tensor:
    """Mix the chosen experts' outputs for rows x [R, E]."""
    shares = F.linear(x, weights.router).softmax(dim=-1, dtype=torch.float32)  # [R, experts]
    share, chosen = shares.topk(spec.per_token, dim=-1)  # [R, per_token] each
    if spec.renormalise:
        share = share / share.sum(dim=-1, keepdim=True)
    share = share.to(x.dtype)
    out = torch.zeros_like(x)
    for expert in range(spec.num_experts):
        rows, slot = torch.where(chosen == expert)
        if len(rows) == 0:
            continue
        gate, up = weights.gate_up[expert](x[rows]).chunk(2, dim=-1)  # [rows, I] each
        y = weights.down[expert](F.silu(gate).mul_(up))
        out.index_add_(0, rows, y * share[rows, slot, None])
    return out
