"""Column scores against dense softmax in float64."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvweave.kernels import column_scores as module
from kvweave.kernels.column_scores import (
    causal_column_mass,
    column_scores,
    layer_column_scores,
    reduce,
)

REDUCES = ["sum", "mean", "max"]
HEADS = [(4, 4), (6, 2), (8, 1)]  # query heads, KV heads


def logits_of(q: Tensor, keys: Tensor) -> Tensor:
    """[Hq, Q, N] in float64."""
    keys = keys.double().repeat_interleave(q.shape[1] // keys.shape[1], dim=1)
    return torch.einsum("qhd,nhd->hqn", q.double(), keys) / math.sqrt(q.shape[-1])


def dense(
    q: Tensor,
    keys: Tensor,
    others: list[tuple[Tensor, Tensor | None]],
    chunks: list[tuple[int, int]],
    normaliser: str,
    rows: str,
    heads: str,
) -> Tensor:
    logits = logits_of(q, keys)
    if normaliser == "chunk":
        p = torch.cat([logits[..., a:b].softmax(-1) for a, b in chunks], dim=-1)
    elif normaliser == "context":
        p = logits.softmax(-1)
    else:
        parts = [logits]
        for more, seen in others:
            extra = logits_of(q, more)
            parts.append(extra if seen is None else extra.masked_fill(~seen, -torch.inf))
        p = torch.cat(parts, dim=-1).softmax(-1)[..., : len(keys)]
    put = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}
    return put[heads](put[rows](p, dim=1), dim=0)


def make_case(
    num_rows: int, num_keys: int, heads: tuple[int, int], dim: int = 8, seed: int = 0
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor | None]]]:
    g = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(num_rows, heads[0], dim, generator=g)
    keys = 2 * torch.randn(num_keys, heads[1], dim, generator=g)
    own = torch.randn(num_rows, heads[1], dim, generator=g)
    front = torch.randn(3, heads[1], dim, generator=g)
    causal = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
    return q, keys, [(own, causal), (front, None)]


@pytest.mark.parametrize("normaliser", ["full", "context", "chunk"])
@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize(("num_rows", "num_keys"), [(1, 1), (5, 13), (7, 64), (3, 129)])
def test_scores_equal_dense_softmax(
    num_rows: int, num_keys: int, shape: tuple[int, int], normaliser: str
) -> None:
    q, keys, others = make_case(num_rows, num_keys, shape)
    cut = num_keys // 3
    chunks = [(0, cut), (cut, num_keys)] if cut else [(0, num_keys)]
    for rows, heads in product(REDUCES, REDUCES):
        ours = column_scores(
            q,
            keys,
            others=others,
            chunks=chunks,
            normaliser=normaliser,  # type: ignore[arg-type]
            rows=rows,  # type: ignore[arg-type]
            heads=heads,  # type: ignore[arg-type]
        )
        assert ours.dtype == torch.float32
        want = dense(q, keys, others, chunks, normaliser, rows, heads)
        torch.testing.assert_close(ours.double(), want, atol=1e-5, rtol=1e-5)


def test_columns_question_and_preamble_share_one_mass_per_row_and_head() -> None:
    q, keys, others = make_case(5, 17, (6, 2))
    total = column_scores(q, keys, others=others).sum()
    for i, (mine, seen) in enumerate(others):
        # each part as columns; what it does not see is nobody's
        rest = [(keys, None), *(o for j, o in enumerate(others) if j != i)]
        if seen is None:
            total += column_scores(q, mine, others=rest).sum()
        else:
            for row in range(len(q)):
                part = [(k, None if m is None else m[row : row + 1]) for k, m in rest]
                total += column_scores(q[row : row + 1], mine[: row + 1], others=part).sum()
    assert float(total) == pytest.approx(5 * 6, abs=1e-3)


def test_every_chunk_has_the_same_mass_under_its_own_softmax() -> None:
    q, keys, _ = make_case(5, 20, (6, 2))
    chunks = [(0, 1), (1, 8), (8, 20)]
    scores = column_scores(q, keys, chunks=chunks, normaliser="chunk")
    for start, end in chunks:
        assert float(scores[start:end].sum()) == pytest.approx(5 * 6, abs=1e-3)


def test_a_row_that_sees_none_of_the_others_is_left_with_the_columns() -> None:
    q, keys, _ = make_case(4, 9, (4, 4))
    more = torch.randn(3, 4, 8)
    blind = torch.zeros(4, 3, dtype=torch.bool)
    ours = column_scores(q, keys, others=[(more, blind)])
    torch.testing.assert_close(ours, column_scores(q, keys, normaliser="context"))


def test_inputs_are_left_alone_and_may_be_half_precision() -> None:
    q, keys, others = make_case(4, 30, (6, 2))
    halves = q.bfloat16(), keys.bfloat16(), [(k.bfloat16(), m) for k, m in others]
    kept = halves[0].clone(), halves[1].clone()
    ours = column_scores(halves[0], halves[1], others=halves[2])
    assert ours.dtype == torch.float32
    assert torch.equal(kept[0], halves[0])
    assert torch.equal(kept[1], halves[1])
    want = dense(halves[0], halves[1], halves[2], [], "full", "sum", "sum")
    torch.testing.assert_close(ours.double(), want, atol=1e-4, rtol=1e-4)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    q, keys, others = make_case(4, 30, (6, 2))
    ours = column_scores(q * 100, keys * 10, others=others)
    want = dense(q * 100, keys * 10, others, [], "full", "sum", "sum")
    assert bool(ours.isfinite().all())
    torch.testing.assert_close(ours.double(), want, atol=1e-3, rtol=1e-3)


def test_nan_reaches_the_caller() -> None:
    q, keys, _ = make_case(4, 9, (4, 4))
    keys[3, 1, 2] = torch.nan
    assert bool(column_scores(q, keys).isnan().any())


@pytest.mark.parametrize("normaliser", ["full", "context", "chunk"])
def test_long_inputs(normaliser: str) -> None:
    q, keys, others = make_case(300, 4001, (4, 2), dim=16)
    chunks = [(0, 1000), (1000, 1001), (1001, 4001)]
    ours = column_scores(q, keys, others=others, chunks=chunks, normaliser=normaliser)  # type: ignore[arg-type]
    want = dense(q, keys, others, chunks, normaliser, "sum", "sum")
    torch.testing.assert_close(ours.double(), want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("rows", REDUCES)
@pytest.mark.parametrize("normaliser", ["full", "context", "chunk"])
def test_scores_do_not_depend_on_the_block(
    normaliser: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, keys, others = make_case(11, 30, (6, 2))
    chunks = [(0, 9), (9, 30)]
    monkeypatch.setattr(module, "BLOCK_ROWS", 4)
    ours = column_scores(
        q,
        keys,
        others=others,
        chunks=chunks,
        normaliser=normaliser,  # type: ignore[arg-type]
        rows=rows,  # type: ignore[arg-type]
    )
    want = dense(q, keys, others, chunks, normaliser, rows, "sum")
    torch.testing.assert_close(ours.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normaliser", ["full", "context", "chunk"])
def test_layers_scored_together_are_scored_each_by_itself(normaliser: str) -> None:
    cases = [make_case(7, 30, (6, 2), seed=seed) for seed in range(3)]
    how = {"chunks": [(0, 9), (9, 30)], "normaliser": normaliser, "rows": "mean", "heads": "max"}
    together = layer_column_scores(
        [q for q, _, _ in cases],
        [keys for _, keys, _ in cases],
        others=[([each[i][0] for _, _, each in cases], cases[0][2][i][1]) for i in range(2)],
        **how,  # type: ignore[arg-type]
    )
    for (q, keys, others), found in zip(cases, together, strict=True):
        torch.testing.assert_close(
            found,
            column_scores(q, keys, others=others, **how),  # type: ignore[arg-type]
        )


def test_a_long_question_is_never_scored_in_one_piece() -> None:
    """A thousand rows over as many keys: no tensor is larger than one block's attention."""
    q, keys, others = make_case(1000, 900, (4, 2))
    largest = 0

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        column_scores(q, keys, others=others)
    assert largest <= 2 * module.BLOCK_ROWS * 1000  # two heads of a group; own keys are 1,000


# ── causal mass ─────────────────────────────────────────────────────────────────────────────────


def dense_mass(q: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
    hidden = torch.arange(len(keys)) > positions[:, None]
    return logits_of(q, keys).masked_fill(hidden, -torch.inf).softmax(-1).sum((0, 1))


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize(
    ("num_keys", "rows"),
    [
        (1, [0]),
        (9, list(range(9))),
        (9, [0, 8]),
        (40, [3, 7, 20, 39]),
        (700, list(range(100, 700))),
        (700, list(range(0, 700, 2))),
    ],
)
def test_causal_mass_equals_dense_softmax(
    num_keys: int, rows: list[int], shape: tuple[int, int]
) -> None:
    q, keys, _ = make_case(len(rows), num_keys, shape)
    positions = torch.tensor(rows)
    ours = causal_column_mass(q, positions, keys)
    torch.testing.assert_close(ours.double(), dense_mass(q, positions, keys), atol=1e-3, rtol=1e-4)
    assert float(ours.sum()) == pytest.approx(len(rows) * shape[0], rel=1e-4)
    assert bool((ours[max(rows) + 1 :] == 0).all())


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_causal_mass_does_not_depend_on_the_block(data: st.DataObject) -> None:
    num_keys = data.draw(st.integers(1, 40))
    rows = sorted(data.draw(st.sets(st.integers(0, num_keys - 1), min_size=1)))
    q, keys, _ = make_case(len(rows), num_keys, (4, 2), seed=num_keys)
    whole = causal_column_mass(q, torch.tensor(rows), keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_ROWS", data.draw(st.integers(1, 7)))
        torch.testing.assert_close(causal_column_mass(q, torch.tensor(rows), keys), whole)


def test_reduce_sums_averages_and_takes_the_most() -> None:
    x = torch.tensor([[1.0, 5.0], [3.0, 1.0]])
    assert reduce(x, "sum", 0).tolist() == [4.0, 6.0]
    assert reduce(x, "mean", 0).tolist() == [2.0, 3.0]
    assert reduce(x, "max", 1).tolist() == [5.0, 3.0]
