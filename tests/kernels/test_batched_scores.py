"""All heads at once give what the loop over heads and chunks defines."""

import pytest
import torch

from kvweave.kernels import column_scores as batched
from kvweave.kernels.column_scores import batched_scores, column_scores, reduce


@pytest.mark.parametrize("rows", ["sum", "mean", "max"])
@pytest.mark.parametrize("normaliser", ["full", "context", "chunk"])
@pytest.mark.parametrize("bounds", [[(0, 30), (30, 60), (60, 90)], [(0, 7), (7, 60), (60, 90)]])
@pytest.mark.parametrize("held", [1, 1 << 20])
def test_all_heads_at_once_equal_the_loop(
    rows: str, normaliser: str, bounds: list, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched, "HELD", held)  # one row at a time, or all
    g = torch.Generator().manual_seed(0)
    q, keys = torch.randn(11, 6, 16, generator=g), torch.randn(90, 2, 16, generator=g)
    own, front = torch.randn(11, 2, 16, generator=g), torch.randn(5, 2, 16, generator=g)
    others = [(own, torch.ones(11, 11).tril().bool()), (front, None)]
    want = column_scores(
        q, keys, others=others, chunks=bounds, normaliser=normaliser, rows=rows, heads="mean"
    )
    each = bounds if normaliser == "chunk" else None
    got = batched_scores(q, keys, others if normaliser == "full" else (), each, rows)
    torch.testing.assert_close(reduce(got, "mean", dim=0), want, atol=1e-6, rtol=1e-5)
