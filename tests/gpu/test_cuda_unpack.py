"""The kernels that lay and move chunk KV against their definitions, on poisoned outputs.

Needs PyTorch with Triton and a CUDA device: `pytest -m gpu tests/gpu`. Without a device they run,
slowly, in Triton's interpreter: `TRITON_INTERPRET=1 pytest -m gpu` on this file.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of PyTorch")

from kvweave.fuse.transfer.placement import packing_of
from kvweave.kernels.gpu.place import shift_rows
from kvweave.kernels.gpu.unpack import unpack_rows
from kvweave.kernels.rope import Angles, make_angles, rotate
from kvweave.kernels.types import StoredRows
from kvweave.kernels.unpack import unpack_reference
from kvweave.kv.format.codec import CODECS, LayerKV, open_codec
from kvweave.kv.format.header import LayerShape

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = (1, 70, 64, 129)
TOKENS = sum(LENGTHS)


def stored(codec: str, heads: int, dim: int) -> tuple[torch.Tensor, StoredRows]:
    """Random chunks behind each other, with garbage in between, and where their tokens go."""
    how = open_codec(codec)
    parts, table, start = [], [], 0
    for length in LENGTHS:
        shape = LayerShape(length, heads, dim, "float32")
        size = how.num_bytes(shape)
        data = torch.full((-(-size // 256) * 256,), 255, dtype=torch.uint8)
        how.encode(LayerKV(*torch.randn(2, length, heads, dim)), data[:size])
        table += [(start, i, length) for i in range(length)]
        parts.append(data)
        start += len(data)
    places = torch.randperm(TOKENS + 9)[:TOKENS]
    columns = torch.tensor(table).T.contiguous()
    return torch.cat(parts).to(DEVICE), StoredRows(*columns.to(DEVICE), places.to(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(2, 128, 128), (3, 64, 32), (1, 80, 80)])
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_laid_chunks_equal_the_definition_and_nothing_else_is_written(
    codec: str, heads: int, dim: int, rotary: int, turns: bool, dtype: torch.dtype
) -> None:
    data, rows = stored(codec, heads, dim)
    inv_freq = 10_000 ** -torch.rand(rotary // 2, device=DEVICE)
    turn = make_angles(rows.row, inv_freq, 1.0, torch.float32) if turns else None
    packing = packing_of(open_codec(codec), torch.float32)
    shape = (2, TOKENS + 9, heads, dim)
    got = torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)
    want = torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)
    unpack_rows(data, packing, rows, turn, *got)
    unpack_reference(data, packing, rows, turn, *want)
    near = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(got, want, atol=near, rtol=near, equal_nan=True)
    assert int(got[0, :, 0, 0].isnan().sum()) == 9


@pytest.mark.parametrize(("heads", "dim", "rotary"), [(2, 128, 128), (3, 64, 32), (1, 80, 80)])
def test_moved_rows_equal_the_definition(heads: int, dim: int, rotary: int) -> None:
    keys, values = torch.randn(2, 90, heads, dim, device=DEVICE)
    by_k, by_v = torch.randn(2, 4, heads, dim, device=DEVICE)
    row = torch.randperm(90, device=DEVICE)[:37]
    chunk = torch.randint(0, 4, (37,), device=DEVICE)
    turn = make_angles(row, torch.rand(rotary // 2, device=DEVICE), 1.0, torch.float32)
    want_k, want_v = keys.clone(), values.clone()
    want_k[row] += rotate(by_k[chunk], Angles(*turn))
    want_v[row] += by_v[chunk]
    shift_rows(keys, values, by_k.contiguous(), by_v.contiguous(), chunk, row, turn)
    torch.testing.assert_close(keys, want_k, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values, want_v)
