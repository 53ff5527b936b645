"""Encoded chunk KV laid by one operator: what the codec decodes, turned to its place."""

import pytest
import torch

from kvweave.fuse.transfer.placement import packing_of
from kvweave.kernels.rope import Angles, make_angles, rotate
from kvweave.kernels.types import StoredRows
from kvweave.kernels.unpack import unpack
from kvweave.kv.format.codec import CODECS, LayerKV, open_codec
from kvweave.kv.format.header import LayerShape

LENGTHS = (1, 70, 64, 129)


def laid(codec: str, heads: int, dim: int, rotary: int, turns: bool, device: str = "cpu"):
    """Chunks through `unpack`, and what the codec and `rotate` make of each by itself."""
    g = torch.Generator().manual_seed(len(codec) + dim)
    how, dtype = open_codec(codec), torch.float32
    places = torch.randperm(sum(LENGTHS) + 9, generator=g)[: sum(LENGTHS)]  # any rows will do
    angles = make_angles(places, 10_000 ** -torch.rand(rotary // 2, generator=g), 1.0, dtype)
    want = LayerKV(*torch.full((2, len(places) + 9, heads, dim), 7.0))
    parts, table, start, at = [], [], 0, 0
    for length in LENGTHS:
        shape = LayerShape(length, heads, dim, "float32")
        kv = LayerKV(*torch.randn(2, length, heads, dim, generator=g))
        data = torch.zeros(-(-how.num_bytes(shape) // 256) * 256, dtype=torch.uint8)
        how.encode(kv, data[: how.num_bytes(shape)])
        got = how.decode(data[: how.num_bytes(shape)], shape)
        own = slice(at, at + length)
        turn = Angles(angles.cos[own], angles.sin[own])
        want.k[places[own]] = rotate(got.k, turn) if turns else got.k
        want.v[places[own]] = got.v
        table += [(start, i, length) for i in range(length)]
        parts.append(data)
        start, at = start + len(data), at + length
    columns = torch.tensor(table).T.contiguous().to(device)
    rows = StoredRows(*columns, places.to(device))
    out = LayerKV(*torch.full((2, len(places) + 9, heads, dim), 7.0, device=device))
    turn = Angles(angles.cos.to(device), angles.sin.to(device)) if turns else None
    unpack(torch.cat(parts).to(device), packing_of(how, dtype), rows, turn, out.k, out.v)
    return LayerKV(out.k.cpu(), out.v.cpu()), want


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(2, 128, 128), (3, 64, 32), (1, 80, 80)])
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_chunks_of_any_lengths_are_laid_as_the_codec_decodes_them(
    codec: str, heads: int, dim: int, rotary: int, turns: bool
) -> None:
    got, want = laid(codec, heads, dim, rotary, turns)
    torch.testing.assert_close(got.k, want.k, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.v, want.v, atol=1e-6, rtol=1e-6)


def test_an_odd_number_of_codes_in_front_of_the_parameters_is_fine() -> None:
    got, want = laid("int4", 1, 6, 6, turns=True)
    torch.testing.assert_close(got.k, want.k, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.v, want.v, atol=1e-6, rtol=1e-6)


def test_no_tokens_are_no_work() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    out = torch.ones(3, 2, 4)
    packing = packing_of(open_codec("raw"), torch.float32)
    unpack(torch.zeros(16, dtype=torch.uint8), packing, StoredRows(*[none] * 4), None, out, out)
    assert bool((out == 1).all())
