"""Many fused passes over one prompt at once: what `fuse` does, for a whole table of cells.

A cell is a choice of rows. Cells with equally many rows run as one dense batch, which on a GPU
costs little more than one. `bench/quality/run.py` checks this pass against `fuse` itself on its
first question, cell by cell.

Shapes: B cells, R rows of each, T tokens of the prompt, L layers, Hk KV heads, D head dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.calibrate.trials import Trials
from kvweave.fuse.drift import Drift
from kvweave.fuse.request import FuseRequest
from kvweave.fuse.stitched import Stitched
from kvweave.fuse.taper import Taper
from kvweave.kernels.attention import attend_grouped
from kvweave.kernels.rope import Angles, rotate
from kvweave.model.decoder import Decoder


class Cell(NamedTuple):
    """One choice of rows."""

    chosen: tuple[int, ...]  # hits to recompute, ascending
    drift: float = 0.0
    taper: Taper | None = None
    stay: tuple[int, ...] = ()  # of them, those that go on where the taper ends
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
    last = decoder.spec.num_layers - 1
    which = torch.arange(num_cells, device=decoder.device)[:, None]
    drifts, later = [
        [Drift(decoder, request, c.chosen, c.drift) if c.drift and c.chosen else None for c in each]
        for each in (cells, [_stays(cell) for cell in cells])
    ]
    ends = [last + 1 if cell.taper is None else cell.taper.layer for cell in cells]
    going = torch.stack(  # [B, R] that run to the end
        [
            torch.isin(own, torch.tensor([*_stays(cell).chosen, *must]))
            for own, cell in zip(rows, cells, strict=True)
        ]
    )
    kvs = [trials.kv(first + b) for b in range(num_cells)]
    for kv in kvs:
        kv.reserve(num_tokens)
    batch = slice(first, first + num_cells)
    for layer in range(last + 1):
        keys = trials.keys[layer, batch, :num_tokens]  # [B, T, Hk, D]
        values = trials.values[layer, batch, :num_tokens]
        keys[:] = stitched.keys(layer)
        values[:] = stitched.values(layer)
        projected = decoder.qkv(layer, h)
        turned = rotate(projected.k, angles)
        shape = (num_cells, num_rows, *keys.shape[2:])
        fresh_k, fresh_v = turned.view(shape), projected.v.reshape(shape)
        runs = going | (torch.tensor(ends)[:, None] >= layer)  # [B, R]
        for b, cell in enumerate(cells):
            drift = drifts[b] if layer <= ends[b] else later[b]
            if cell.exact_layer_1 and layer == 1:
                keys[b] = trials.keys[layer, full, :num_tokens]
                values[b] = trials.values[layer, full, :num_tokens]
            if drift is not None:
                part = (b * num_rows + runs[b].nonzero().flatten()).to(decoder.device)
                fresh = _Fresh(projected.q[part], projected.k[part], projected.v[part])
                drift.move(layer, rows[b][runs[b]], fresh, kvs[b])
        written = runs.to(decoder.device)[:, :, None, None]  # who has left leaves what was there
        keys[which, at] = torch.where(written, fresh_k, keys[which, at])
        values[which, at] = torch.where(written, fresh_v, values[which, at])
        q, mask = projected.q, seen
        if layer == last:
            q = q.view(num_cells, num_rows, *q.shape[1:])[:, -1].contiguous()
            h = h.view(num_cells, num_rows, -1)[:, -1].clone()
            at_end = Angles(
                angles.cos.view(num_cells, num_rows, 1, -1)[:, -1],
                angles.sin.view(num_cells, num_rows, 1, -1)[:, -1],
            )
            q, mask = rotate(q, at_end), seen[:, -1:]
        else:
            q = rotate(q, angles)
        q = q.view(num_cells, -1, *q.shape[1:])
        h = decoder.finish(layer, h, attend_grouped(q, keys, values, mask).flatten(0, 1))
    return decoder.logits(h)


def _stays(cell: Cell) -> Cell:
    """The cell as it is behind its taper."""
    return cell if cell.taper is None else cell._replace(chosen=cell.stay, taper=None)


class _Fresh(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
