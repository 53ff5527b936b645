"""Many fused passes over one prompt at once: what `fuse` does, for a whole table of cells.

A cell is a choice of rows. Cells with equally many rows run as one dense batch, which on a GPU
costs little more than one. `bench/quality.py` checks this pass against `fuse` itself on its first
question, cell by cell.

Shapes: B cells, R rows of each, T tokens of the prompt, L layers, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.fuse.drift import Drift
from kvweave.fuse.request import FuseRequest
from kvweave.fuse.stitched import Stitched
from kvweave.fuse.trials import Trials
from kvweave.kernels.grouped import attend_grouped
from kvweave.kernels.rope import Angles, rotate
from kvweave.model.decoder import Decoder


class Cell(NamedTuple):
    """One choice of rows."""

    chosen: tuple[int, ...]  # hits to recompute, ascending
    drift: float = 0.0
    exact_layer_1: bool = False  # every row ran to layer 1 in flight: its KV there is exact


@torch.inference_mode()
def batched_pass(
    decoder: Decoder,
    request: FuseRequest,
    stitched: Stitched,
    cells: Sequence[Cell],
    trials: Trials,
    first: int,
    full: int = 0,
) -> Tensor:
    """Fill trials [first, first + B) and return their logits [B, V].

    All cells choose equally many rows. Trial number `full` holds full prefill.
    """
    must, num_tokens = request.must_compute, len(request.prompt_ids)
    rows = torch.tensor([sorted([*cell.chosen, *must]) for cell in cells])  # [B, R]
    at = rows.to(decoder.device)
    num_cells, num_rows = rows.shape
    angles = decoder.angles(at.flatten())
    ids = torch.tensor(request.prompt_ids, device=decoder.device)
    h = decoder.embed(ids[at.flatten()])
    seen = torch.arange(num_tokens, device=decoder.device) <= at[:, :, None]  # [B, R, T]
    which = torch.arange(num_cells, device=decoder.device)[:, None]
    drifts = [
        Drift(decoder, request, cell.chosen, cell.drift) if cell.drift and cell.chosen else None
        for cell in cells
    ]
    kvs = [trials.kv(first + b) for b in range(num_cells)]
    for kv in kvs:
        kv.reserve(num_tokens)
    batch = slice(first, first + num_cells)
    last = decoder.spec.num_layers - 1
    for layer in range(last + 1):
        keys = trials.keys[layer, batch, :num_tokens]  # [B, T, Hk, D]
        values = trials.values[layer, batch, :num_tokens]
        keys[:] = stitched.keys(layer)
        values[:] = stitched.values(layer)
        projected = decoder.qkv(layer, h)
        turned = rotate(projected.k, angles)
        shape = (num_cells, num_rows, *keys.shape[2:])
        fresh_k, fresh_v = turned.view(shape), projected.v.reshape(shape)
        for b, (cell, drift) in enumerate(zip(cells, drifts, strict=True)):
            if cell.exact_layer_1 and layer == 1:
                keys[b] = trials.keys[layer, full, :num_tokens]
                values[b] = trials.values[layer, full, :num_tokens]
            if drift is not None:
                part = slice(b * num_rows, (b + 1) * num_rows)
                fresh = _Fresh(projected.q[part], projected.k[part], projected.v[part])
                drift.move(layer, rows[b], fresh, kvs[b])
        keys[which, at] = fresh_k
        values[which, at] = fresh_v
        q, mask = projected.q, seen
        if layer == last:
            q = q.view(num_cells, num_rows, *q.shape[1:])[:, -1].contiguous()
            h = h.view(num_cells, num_rows, -1)[:, -1].clone()
            ends = Angles(
                angles.cos.view(num_cells, num_rows, 1, -1)[:, -1],
                angles.sin.view(num_cells, num_rows, 1, -1)[:, -1],
            )
            q, mask = rotate(q, ends), seen[:, -1:]
        else:
            q = rotate(q, angles)
        q = q.view(num_cells, -1, *q.shape[1:])
        h = decoder.finish(layer, h, attend_grouped(q, keys, values, mask).flatten(0, 1))
    return decoder.logits(h)


class _Fresh(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
