"""Copies of chunks moved as shared chunks are seen: every key of one by the same, turned."""

import pytest
import torch
from torch import Tensor

from kvweave.fuse import drift
from kvweave.fuse.protocol import FusionDecoder
from kvweave.fuse.request import ChunkSpan
from kvweave.kernels.rope import Angles, rotate


def move_by_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, drift moves the keys of a chunk by the mean of what it moves each of them by:
    with that, copies and shared chunks must give the same."""

    def mover(decoder: FusionDecoder, spans: list[ChunkSpan], _: object = None) -> drift._Move:
        device = decoder.device

        def move(keys: Tensor, values: Tensor, by_k: Tensor, by_v: Tensor) -> None:
            for span, k, v in zip(spans, by_k, by_v, strict=True):
                at = decoder.angles(torch.arange(span.num_tokens, device=device))
                at = Angles(at.cos.float(), at.sin.float())
                each = rotate(k.expand(span.num_tokens, -1, -1).contiguous(), at)
                start = decoder.turn(torch.tensor([span.start], device=device))
                here = slice(span.start, span.end)
                for x, by in ((keys, rotate(each.mean(0, keepdim=True), start)), (values, v)):
                    x[here] = (x[here].to(torch.promote_types(x.dtype, by.dtype)) + by).to(x.dtype)

        return move

    monkeypatch.setattr(drift, "run_by_run", mover)
    monkeypatch.setattr(drift, "all_at_once", mover)
