"""Stored chunks in C against codec, rotation and drift in PyTorch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.stored import (
    FreshRows,
    StoredCodes,
    lay_chunks,
    place_rows,
    shift_runs,
    sum_changes,
)
from kvweave.kernels.place import mean_changes, place
from kvweave.kernels.rope import Angles, make_angles, rotate
from kvweave.kernels.shift import ChunkRuns
from kvweave.kernels.shift import shift_runs as shift_any_runs
from kvweave.kernels.types import Owners
from kvweave.kv.format.codec import LayerKV, open_codec
from kvweave.kv.format.header import LayerShape

ByTorch = Callable[[Callable[[], Tensor]], Tensor]
SIZES = [(3, 64, 64), (2, 128, 128), (1, 80, 32), (2, 7, 6), (1, 200, 0)]  # heads, dim, rotary
LENGTHS = (1, 70, 64, 129, 31)


def make_chunks(heads: int, dim: int) -> tuple[list[StoredCodes], list[LayerKV]]:
    """Chunks with gaps between their places, and what the codec says they are."""
    g = torch.Generator().manual_seed(heads * dim)
    codec, chunks, decoded, row = open_codec("int8"), [], [], 3
    for length in LENGTHS:
        shape = LayerShape(length, heads, dim, "float32")
        size = torch.logspace(-4, 3, dim)  # lows and scales of every size, subnormal ones too
        kv = LayerKV(*(torch.randn(2, length, heads, dim, generator=g) * size))
        data = torch.empty(codec.num_bytes(shape), dtype=torch.uint8)
        codec.encode(kv, data)
        chunks.append(StoredCodes(data, length, row))
        decoded.append(codec.decode(data, shape))
        row += length + 2
    return chunks, decoded


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("heads", "dim", "rotary"), SIZES)
def test_chunks_are_laid_as_the_codec_decodes_and_rope_turns_them(
    library: CompiledLibrary, heads: int, dim: int, rotary: int, threads: int
) -> None:
    chunks, decoded = make_chunks(heads, dim)
    at = torch.cat([torch.arange(c.row, c.row + c.num_tokens) for c in chunks])
    turn = make_angles(at, torch.rand(rotary // 2), 1.1, torch.float32)
    keys, values = torch.full((2, int(at[-1]) + 4, heads, dim), torch.nan)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        lay_chunks(library, chunks, 64, turn, keys, values)
    finally:
        torch.set_num_threads(before)
    want_k = rotate(torch.cat([kv.k for kv in decoded]), turn)
    torch.testing.assert_close(keys[at], want_k, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values[at], torch.cat([kv.v for kv in decoded]), rtol=1e-6, atol=0)
    others = torch.ones(len(keys), dtype=torch.bool).index_fill_(0, at, False)
    assert keys[others].isnan().all()
    assert values[others].isnan().all()


def make_changes(heads: int, dim: int, rotary: int) -> tuple[FreshRows, Angles, Tensor, Owners]:
    g = torch.Generator().manual_seed(dim)
    fused = torch.randn(40, 4 * heads, dim, generator=g)  # fresh rows lie between other heads
    k, v = fused[:, heads : 2 * heads], fused[:, 2 * heads : 3 * heads]
    rows = torch.randperm(40, generator=g)[:12].sort().values
    at = torch.randperm(90, generator=g)[:12].sort().values
    turn = make_angles(at, torch.rand(rotary // 2, generator=g), 1.3, torch.float32)
    kv = torch.randn(2, 90, heads, dim, generator=g)
    owners = Owners(torch.tensor([0, 5, 5, 6, 12], dtype=torch.int32), torch.rand(4, generator=g))
    return FreshRows(k, v, rows, at), turn, kv, owners


@pytest.mark.parametrize(("heads", "dim", "rotary"), SIZES)
def test_changes_are_the_definitions(
    library: CompiledLibrary, by_torch: ByTorch, heads: int, dim: int, rotary: int
) -> None:
    fresh, turn, kv, owners = make_changes(heads, dim, rotary)
    found = sum_changes(library, fresh, turn, kv[0], kv[1], owners)

    def definition() -> Tensor:
        return mean_changes(fresh.k, fresh.v, fresh.rows, turn, fresh.at, kv[0], kv[1], owners)

    right = by_torch(definition)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(definition(), right, rtol=1e-4, atol=1e-5)
    assert (right[:, 1] == 0).all()  # a chunk without rows
    assert right[:, 3].abs().amax() > 0.1


@pytest.mark.parametrize(("heads", "dim", "rotary"), SIZES)
def test_chunks_move_as_the_definition_moves_them(
    library: CompiledLibrary, by_torch: ByTorch, heads: int, dim: int, rotary: int
) -> None:
    g = torch.Generator().manual_seed(dim)
    kv, by = torch.randn(2, 90, heads, dim, generator=g), torch.randn(2, 3, heads, dim, generator=g)
    places, freq = ((2, 30), (33, 34), (50, 90)), torch.rand(rotary // 2, generator=g)
    chunks = [
        (start, make_angles(torch.arange(start, end), freq, 1.2, torch.float32))
        for start, end in places
    ]
    runs = ChunkRuns.from_chunks(chunks, dim)

    def moved() -> Tensor:
        held = kv.clone()
        shift_any_runs(held[0], held[1], by[0], by[1], runs)
        return held

    right, found = by_torch(moved), kv.clone()
    shift_runs(library, (found[0], found[1]), (by[0], by[1]), runs.table, runs.turn)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert torch.equal(moved(), found)
    assert (right[:, :2] == kv[:, :2]).all()
    assert (right[:, 2:30] != kv[:, 2:30]).any()


@pytest.mark.parametrize("num_rows", [0, 1, 7, 300])
@pytest.mark.parametrize(("heads", "dim", "rotary"), SIZES)
def test_fresh_rows_go_where_the_definition_puts_them(
    library: CompiledLibrary,
    by_torch: ByTorch,
    num_rows: int,
    heads: int,
    dim: int,
    rotary: int,
) -> None:
    g = torch.Generator().manual_seed(dim)
    fused = torch.randn(num_rows, 5 * heads, dim, generator=g)
    q, k, v = fused.split([3 * heads, heads, heads], dim=1)
    at = torch.randperm(400, generator=g)[:num_rows].sort().values
    turn = make_angles(at, torch.rand(rotary // 2, generator=g), 1.2, torch.float32)
    kv = torch.randn(2, 400, heads, dim, generator=g)

    def placed() -> Tensor:
        held = kv.clone()
        turned = place(q, k, v, turn, at, held[0], held[1])
        return torch.cat([turned.flatten(), held.flatten()])

    right, held = by_torch(placed), kv.clone()
    turned = place_rows(library, (q, k, v), turn, at, held[0], held[1])
    found = torch.cat([turned.flatten(), held.flatten()])
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert torch.equal(placed(), found)


def test_what_does_not_fit_is_refused_before_memory_is_touched(library: CompiledLibrary) -> None:
    (chunk, *_), _ = make_chunks(2, 8)
    keys, values = torch.zeros(2, 10, 2, 8)
    turn = make_angles(torch.arange(1), torch.ones(4), 1.0, torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        lay_chunks(library, [chunk._replace(data=chunk.data[:-1])], 64, turn, keys, values)
    with pytest.raises(ValueError, match="not among 10"):
        lay_chunks(library, [chunk._replace(row=10)], 64, turn, keys, values)
    with pytest.raises(ValueError, match="angles"):
        lay_chunks(library, [chunk, chunk], 64, turn, keys, values)
    turned = torch.zeros(2, 10, 8, 2).transpose(2, 3)
    with pytest.raises(ValueError, match="side by side"):
        lay_chunks(library, [chunk], 64, turn, turned[0], turned[1])
    fresh, turn, kv, owners = make_changes(2, 8, 8)
    with pytest.raises(ValueError, match="not among 40 fresh"):
        sum_changes(library, fresh._replace(rows=fresh.rows + 40), turn, kv[0], kv[1], owners)
    qkv, angles = (fresh.k[:12], fresh.k[:12], fresh.v[:12]), turn
    with pytest.raises(ValueError, match="not among 90"):
        place_rows(library, qkv, angles, fresh.at + 90, kv[0], kv[1])
    with pytest.raises(ValueError, match="places of"):
        place_rows(library, qkv, angles, fresh.at[:3], kv[0], kv[1])
    longer = owners._replace(bounds=owners.bounds + 9)
    with pytest.raises(ValueError, match="bounds"):
        sum_changes(library, fresh, turn, kv[0], kv[1], longer)
    runs = ChunkRuns.from_chunks(
        [(85, make_angles(torch.arange(6), torch.ones(4), 1, torch.float32))], 8
    )
    by = torch.zeros(2, 1, 2, 8)
    with pytest.raises(ValueError, match="not among 90"):
        shift_runs(library, (kv[0], kv[1]), (by[0], by[1]), runs.table, runs.turn)
