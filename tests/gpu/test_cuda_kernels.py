"""The GPU kernels against float64 on fresh random data: odd sizes, poisoned memory, many shapes.

Needs PyTorch with Triton and a CUDA device: `pytest -m gpu tests/gpu`. Without a device the Triton
ones run, slowly, in its interpreter: `TRITON_INTERPRET=1 pytest -m gpu` on this file.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton comes with CUDA builds of PyTorch")

from kvweave.kernels.column_scores import causal_column_mass, column_scores
from kvweave.kernels.gpu import columns, elementwise
from kvweave.kernels.gpu.attention import attend_pages, attend_segments
from kvweave.kernels.gpu.decode import DecodeTables, attend_decode
from kvweave.kernels.types import PagedSegment, Segment

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP16, FP32 = torch.float16, torch.float32
BF16 = torch.bfloat16 if DEVICE.type == "cuda" else FP16  # the interpreter has no bfloat16
NEAR = {torch.bfloat16: 6e-3, FP16: 1e-3, FP32: 1e-5}  # relative, of the whole output


def randn(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def poison(*sizes: int) -> None:
    """Leave NaN in the memory that the next allocations of these sizes get."""
    held = [torch.full((n,), torch.nan, device=DEVICE) for n in sizes for _ in range(3)]
    del held


def dense(q: Tensor, positions: Tensor, k: Tensor, v: Tensor, key_at: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("rhd,nhd->hrn", q.double(), k) / q.shape[-1] ** 0.5
    hidden = key_at.to(DEVICE)[None, None] > positions.to(DEVICE)[None, :, None]
    return torch.einsum("hrn,nhd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


class Sequences:
    """Some sequences: their rows, their keys (NaN behind the last one) and the exact answer."""

    def __init__(self, sizes: list[tuple[int, int]], hk: int, g: int, d: int, dtype: torch.dtype):
        self.keys: list[tuple[Tensor, Tensor]] = []
        self.bounds: list[tuple[int, int]] = []
        q, positions, exact, start = [], [], [], 0
        for num_keys, num_rows in sizes:
            at = torch.tensor(sorted(random.sample(range(num_keys), num_rows)))
            seen = int(at[-1]) + 1
            k, v = randn(2, num_keys + 70, hk, d, dtype=dtype)
            k[seen:], v[seen:] = torch.nan, torch.nan
            rows = randn(num_rows, hk * g, d, dtype=dtype)
            exact.append(dense(rows, at, k[:seen], v[:seen], torch.arange(seen)))
            self.keys.append((k, v))
            self.bounds.append((start, start + num_rows))
            start += num_rows
            q.append(rows)
            positions.append(at)
        self.q, self.positions, self.exact = torch.cat(q), torch.cat(positions), torch.cat(exact)

    def attend(self) -> Tensor:
        segments = [
            Segment(*rows, k, v) for rows, (k, v) in zip(self.bounds, self.keys, strict=True)
        ]
        poison(self.q.numel() // 2, self.q.numel())
        return attend_segments(self.q, self.positions, segments, None)

    def attend_in_pages(self, page: int) -> Tensor:
        """Pages of all sequences, shuffled; what no row sees is NaN."""
        tables, pool_k, pool_v = [], [], []
        total = sum(len(k) // page + 1 for k, _ in self.keys)
        free = random.sample(range(total), total)
        shape = (total, page, *self.keys[0][0].shape[1:])
        pool_k, pool_v = torch.full((2, *shape), torch.nan, dtype=self.q.dtype, device=DEVICE)
        for k, v in self.keys:
            seen = int(k[:, 0, 0].isfinite().sum())
            table = [free.pop() for _ in range(-(-seen // page))]
            for pool, x in ((pool_k, k), (pool_v, v)):
                for j, number in enumerate(table):
                    part = x[j * page : (j + 1) * page]
                    pool[number, : len(part)] = part
            tables.append(table)
        segments = [
            PagedSegment(*rows, table) for rows, table in zip(self.bounds, tables, strict=True)
        ]
        poison(self.q.numel() // 2, self.q.numel())
        return attend_pages(self.q, self.positions, segments, pool_k, pool_v, None)


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"),
    [
        (64, 3, BF16),
        (80, 1, FP16),
        (96, 4, BF16),
        (128, 4, BF16),
        (128, 7, FP16),
        (256, 2, BF16),
        (64, 4, FP32),
        (16, 2, FP32),
    ],
)
def test_sparse_rows_are_what_float64_says(head_dim: int, group: int, dtype: torch.dtype) -> None:
    for sizes in [[(1, 1)], [(700, 1)], [(70, 70)], [(700, 130)], [(333, 9), (1, 1), (260, 200)]]:
        case = Sequences(sizes, 2, group, head_dim, dtype)
        assert distance(case.attend(), case.exact) < NEAR[dtype], sizes
        assert distance(case.attend_in_pages(32), case.exact) < NEAR[dtype], sizes


@pytest.mark.parametrize("page", [8, 16, 64, 256])
def test_pages_of_any_size_hold_the_same_keys(page: int) -> None:
    case = Sequences([(700, 130), (50, 50)], 2, 4, 128, BF16)
    assert distance(case.attend_in_pages(page), case.exact) < NEAR[BF16]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="too much for the interpreter")
@pytest.mark.parametrize("num_rows", [33, 700, 9000])
def test_long_prompts_are_cut_and_merged_right(num_rows: int) -> None:
    case = Sequences([(9000, num_rows)], 2, 4, 128, BF16)
    assert distance(case.attend(), case.exact) < NEAR[BF16]
    assert distance(case.attend_in_pages(32), case.exact) < NEAR[BF16]


def test_compact_keys_are_seen_by_their_positions() -> None:
    key_at = torch.tensor(sorted(random.sample(range(500), 90)))
    k, v = randn(2, 90, 2, 64)
    positions = torch.tensor(sorted(random.sample(range(int(key_at[0]), 500), 40)))
    q = randn(40, 6, 64)
    found = attend_segments(q, positions, [Segment(0, 40, k, v, key_at)], None)
    assert distance(found, dense(q, positions, k, v, key_at)) < NEAR[FP32]


def test_sequences_may_share_pages() -> None:
    pool_k, pool_v = randn(2, 6, 16, 2, 64, dtype=BF16)
    tables = [[3, 1, 5], [3, 1, 2, 0]]
    positions = torch.tensor([0, 20, 47, 5, 33, 60])
    q = randn(6, 8, 64, dtype=BF16)
    segments = [PagedSegment(0, 3, tables[0]), PagedSegment(3, 6, tables[1])]
    found = attend_pages(q, positions, segments, pool_k, pool_v, None)
    for start, table in zip((0, 3), tables, strict=True):
        k, v = pool_k[table].flatten(0, 1), pool_v[table].flatten(0, 1)
        rows = slice(start, start + 3)
        exact = dense(q[rows], positions[rows], k, v, torch.arange(len(k)))
        assert distance(found[rows], exact) < NEAR[BF16]


def test_decode_tables_answer_for_each_sequence_and_leave_absent_ones_zero() -> None:
    pool_k, pool_v = randn(2, 90, 16, 2, 64, dtype=BF16)
    tables = DecodeTables(
        4, 60, num_heads=8, num_kv_heads=2, head_dim=64, dtype=BF16, device=DEVICE
    )
    q = randn(4, 8, 64, dtype=BF16)
    graph = None
    if DEVICE.type == "cuda":  # captured once, for any lengths and pages
        tables.update([1], [[0]])
        attend_decode(q, tables, pool_k, pool_v)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = attend_decode(q, tables, pool_k, pool_v)
    for lengths in ([1, 900, 77], [500, 3], [17, 18, 19, 800]):
        pages = [random.sample(range(90), 60) for _ in lengths]
        tables.update(lengths, pages)
        if graph is None:
            found = attend_decode(q, tables, pool_k, pool_v)
        else:
            found.fill_(torch.nan)
            graph.replay()
        for i, (length, table) in enumerate(zip(lengths, pages, strict=True)):
            k, v = (x[table].flatten(0, 1)[:length] for x in (pool_k, pool_v))
            last = torch.tensor([length - 1])
            exact = dense(q[i : i + 1], last, k, v, torch.arange(length))
            assert distance(found[i : i + 1], exact) < NEAR[BF16]
        assert bool((found[len(lengths) :] == 0).all())


@pytest.mark.skipif(DEVICE.type == "cpu", reason="graphs are CUDA's")
def test_attention_by_host_positions_refuses_to_be_recorded() -> None:
    case = Sequences([(70, 20)], 2, 4, 64, BF16)
    case.attend()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        case.q.add_(0)  # an empty graph warns
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            attend_segments(case.q, case.positions, [Segment(0, 20, *case.keys[0])], None)


def test_sequences_of_different_layouts_are_answered_too() -> None:
    case = Sequences([(70, 20), (90, 33)], 2, 4, 64, BF16)
    k, v = case.keys[0]
    case.keys[0] = (torch.cat((k, k), dim=1)[:, :2], torch.cat((v, v), dim=1)[:, :2])
    assert distance(case.attend(), case.exact) < NEAR[BF16]


def test_column_scores_are_what_float64_says() -> None:
    q, k, own = randn(70, 6, 80), randn(333, 2, 80), randn(70, 2, 80)
    seen = torch.ones(70, 70, device=DEVICE).tril().bool()
    logits = torch.einsum(
        "qhd,nhd->hqn", q.double(), torch.cat((k, own)).double().repeat_interleave(3, 1)
    )
    logits = logits / 80**0.5
    logits[:, :, 333:].masked_fill_(~seen, -torch.inf)
    exact = logits.softmax(-1)[..., :333].sum((0, 1))
    if DEVICE.type == "cuda":
        found = column_scores(q, k, others=[(own, seen)])
        torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-4)
    positions = torch.tensor(sorted(random.sample(range(333), 70)))
    hidden = torch.arange(333, device=DEVICE) > positions.to(DEVICE)[:, None]
    exact = logits[..., :333].masked_fill(hidden, -torch.inf).softmax(-1)
    limits = (positions + 1).to(DEVICE, torch.int32)
    found = columns.column_reduce(q, k, columns.row_lse(q, k, limits), "sum", limits).sum(0)
    torch.testing.assert_close(found.double(), exact.sum((0, 1)), atol=1e-4, rtol=1e-4)
    found = columns.column_reduce(q, k, columns.row_lse(q, k, limits), "max", limits)
    torch.testing.assert_close(found.double(), exact.amax(1), atol=1e-4, rtol=1e-4)
    if DEVICE.type == "cuda":
        found = causal_column_mass(q, positions, k)
        torch.testing.assert_close(found.double(), exact.sum((0, 1)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("unit", "rows"), [(16, 70), (1, 9)])
def test_layers_that_lie_anywhere_are_scored_in_one_go(unit: int, rows: int) -> None:
    """Keys of three layers apart by a multiple of 16 elements, or not; NaN between them."""
    held = torch.full((3, 333 * 2 * 64 + 16 + unit), torch.nan, device=DEVICE)
    keys = [held[i, : 333 * 2 * 64].view(333, 2, 64) for i in (1, 2, 0)]
    for k in keys:
        k.copy_(randn(333, 2, 64))
    stack = columns.Stack.from_layers(keys)
    assert stack.unit == unit
    q = randn(3, rows, 6, 64)
    lse = columns.split_lse(q, stack)
    assert len(lse) > 1, "of several parts, merged by the second kernel"
    for how in ("sum", "max"):
        found = columns.columns_reduce(q, stack, lse, how)  # type: ignore[arg-type]
        for i, k in enumerate(keys):
            wide = k.double().repeat_interleave(3, 1)
            p = (torch.einsum("qhd,nhd->hqn", q[i].double(), wide) / 8).softmax(-1)
            want = p.sum(1) if how == "sum" else p.amax(1)
            torch.testing.assert_close(found[i].double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_norm_gate_and_rotation_are_their_definitions(dtype: torch.dtype) -> None:
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == FP32 else {"atol": 4e-2, "rtol": 2e-2}
    for x in (randn(9, 576, dtype=dtype), randn(9, 7, 80, dtype=dtype)[:, 2:5]):
        w = randn(x.shape[-1], dtype=dtype)
        exact = F.rms_norm(x.double(), w.shape, w.double(), 1e-5)
        poison(x.numel() // 2, x.numel())
        torch.testing.assert_close(elementwise.rms_norm(x, w, 1e-5).double(), exact, **near)
        whole = x if x.dim() == 2 else x._base  # in place: what lies beside the heads stays
        beside = None if whole is x else whole[:, :2].clone()
        elementwise.rms_norm(x, w, 1e-5, x)
        torch.testing.assert_close(x.double(), exact, **near)
        assert beside is None or torch.equal(whole[:, :2], beside)
    x = randn(5, 2 * 1536, dtype=dtype)
    exact = F.silu(x[:, :1536].double()) * x[:, 1536:].double()
    torch.testing.assert_close(elementwise.silu_mul(x).double(), exact, **near)
    x = randn(5, 9, 80, dtype=dtype)[:, 1:7]
    phase = torch.rand(5, 1, 10, device=DEVICE).to(dtype)
    cos, sin = phase.cos().double(), phase.sin().double()
    x1, x2, rest = x.double().split((10, 10, 60), dim=-1)
    exact = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1)
    out = torch.full(x.shape, torch.nan, dtype=dtype, device=DEVICE)
    found = elementwise.rotate(x, cos.to(dtype), sin.to(dtype), out)
    torch.testing.assert_close(found.double(), exact, **near)
