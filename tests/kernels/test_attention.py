"""The ragged operator against a dense definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvweave.kernels import attention
from kvweave.kernels.attention import attend
from kvweave.kernels.types import Segment


def dense(q: Tensor, positions: Tensor, k: Tensor, v: Tensor, key_positions: Tensor) -> Tensor:
    """Row i sees key j iff key_positions[j] <= positions[i]. Nothing clever."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("rhd,nhd->hrn", q.double(), k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(key_positions[None, None] > positions[None, :, None], -torch.inf)
    return torch.einsum("hrn,nhd->rhd", scores.softmax(-1), v)


def make_case(
    num_keys: int, rows: list[int], seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(len(rows), 6, 16, generator=g)
    k, v = torch.randn(2, num_keys, 2, 16, generator=g)
    return q, torch.tensor(rows), k, v


@pytest.mark.parametrize(
    ("num_keys", "rows"),
    [
        (1, [0]),
        (9, [8]),
        (9, list(range(9))),
        (9, list(range(4, 9))),
        (40, [0, 3, 4, 20, 39]),
        (700, list(range(700))),
        (700, list(range(100, 700))),
        (700, list(range(0, 700, 2))),
        (700, [*range(300), 500, 699]),
    ],
)
def test_rows_see_what_stands_at_or_before_them(num_keys: int, rows: list[int]) -> None:
    q, positions, k, v = make_case(num_keys, rows)
    ours = attend(q, positions, [Segment(0, len(rows), k, v)])
    want = dense(q, positions, k, v, torch.arange(num_keys))
    torch.testing.assert_close(ours.double(), want, atol=1e-5, rtol=1e-5)


def test_keys_behind_a_row_are_never_read() -> None:
    rows = [2, 300, 301]
    q, positions, k, v = make_case(600, rows)
    clean = attend(q, positions, [Segment(0, 3, k, v)])
    k[302:], v[302:] = torch.nan, torch.nan
    assert torch.equal(attend(q, positions, [Segment(0, 3, k, v)]), clean)


def test_compact_keys_are_placed_by_their_positions() -> None:
    key_positions = torch.tensor([0, 4, 5, 90, 200, 400])
    q, positions, k, v = make_case(6, [4, 89, 90, 399, 1000])
    ours = attend(q, positions, [Segment(0, 5, k, v, key_positions)])
    want = dense(q, positions, k, v, key_positions)
    torch.testing.assert_close(ours.double(), want, atol=1e-5, rtol=1e-5)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_rows_over_any_compact_keys(data: st.DataObject) -> None:
    places = st.sets(st.integers(0, 30), min_size=1, max_size=12)
    key_positions = torch.tensor(sorted(data.draw(places)))
    first = int(key_positions[0])
    rows = sorted(data.draw(st.sets(st.integers(first, 40), min_size=1, max_size=12)))
    q, positions, k, v = make_case(len(key_positions), rows)
    ours = attend(q, positions, [Segment(0, len(rows), k, v, key_positions)])
    want = dense(q, positions, k, v, key_positions)
    torch.testing.assert_close(ours.double(), want, atol=1e-5, rtol=1e-5)


def test_as_many_rows_as_keys_behind_them_all_see_all() -> None:
    key_positions = torch.tensor([0, 1, 2])
    q, positions, k, v = make_case(3, [5, 6, 7])
    ours = attend(q, positions, [Segment(0, 3, k, v, key_positions)])
    want = dense(q, positions, k, v, key_positions)
    torch.testing.assert_close(ours.double(), want, atol=1e-5, rtol=1e-5)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_batch_of_sequences_equals_each_alone(data: st.DataObject) -> None:
    q_parts, at_parts, segments, want, start = [], [], [], [], 0
    for seed in range(data.draw(st.integers(1, 4))):
        num_keys = data.draw(st.integers(1, 70))
        rows = sorted(data.draw(st.sets(st.integers(0, num_keys - 1), min_size=1)))
        q, positions, k, v = make_case(num_keys, rows, seed)
        q_parts.append(q)
        at_parts.append(positions)
        segments.append(Segment(start, start + len(rows), k, v))
        want.append(dense(q, positions, k, v, torch.arange(num_keys)))
        start += len(rows)
    ours = attend(torch.cat(q_parts), torch.cat(at_parts), segments)
    torch.testing.assert_close(ours.double(), torch.cat(want), atol=1e-5, rtol=1e-5)


def test_blocks_of_any_size_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(range(5, 50))
    q, positions, k, v = make_case(50, rows)
    whole = attend(q, positions, [Segment(0, len(rows), k, v)])
    for block in (1, 7, 44, 45, 46):
        monkeypatch.setattr(attention, "BLOCK_ROWS", block)
        parts = attend(q, positions, [Segment(0, len(rows), k, v)])
        torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)
