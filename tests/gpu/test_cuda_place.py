"""The kernels that turn and lay fresh rows, against their definitions, on poisoned memory.

Needs PyTorch with Triton and a CUDA device: `pytest -m gpu tests/gpu`. Without a device they run in
Triton's interpreter: `TRITON_INTERPRET=1 pytest -m gpu` on this file.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of PyTorch")

from kvweave.kernels.gpu.place import mean_change_rows, place_rows
from kvweave.kernels.place import mean_changes, place
from kvweave.kernels.rope import Angles, make_angles
from kvweave.kernels.types import Owners

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(4, 2, 128, 128), (9, 3, 64, 32), (5, 1, 80, 80), (1, 1, 96, 48)]
TOKENS = 50


def fresh(hq: int, hk: int, dim: int, rotary: int, dtype: torch.dtype) -> tuple:
    rows = torch.randperm(TOKENS)[:21].sort().values
    fused = torch.randn(len(rows), hq + 2 * hk, dim, dtype=dtype)
    turn = make_angles(rows, torch.rand(rotary // 2), 1.2, dtype)
    return torch.split(fused, [hq, hk, hk], dim=1), turn, rows


def there(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(DEVICE) for x in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_placed_rows_equal_the_definition(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    (q, k, v), turn, rows = fresh(*shape, dtype)
    want_k, want_v = torch.full((2, TOKENS, shape[1], shape[2]), torch.nan, dtype=dtype)
    keys, values = there(want_k.clone(), want_v.clone())
    want_q = place(q.cpu(), k, v, turn, rows, want_k, want_v)
    fused = torch.cat([q, k, v], dim=1).to(DEVICE)  # views of one projection, as a decoder gives
    views = torch.split(fused, [shape[0], shape[1], shape[1]], dim=1)
    angles = Angles(*there(*turn))
    got_q = place_rows(*views, angles, *there(rows), keys, values)
    for got, want in ((got_q, want_q), (keys, want_k), (values, want_v)):
        torch.testing.assert_close(got.cpu(), want, atol=4e-3, rtol=4e-3, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_mean_changes_equal_the_definition(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Chunks of one row and of more than a program looks at together."""
    (_, k, v), turn, rows = fresh(*shape, dtype)
    keys, values = torch.full((2, TOKENS, shape[1], shape[2]), torch.nan, dtype=dtype)
    keys[rows], values[rows] = torch.randn(2, len(rows), *shape[1:3], dtype=dtype)
    chosen = torch.tensor([0, *range(2, 20)])
    own = Angles(turn.cos[chosen], turn.sin[chosen])
    owners = Owners(torch.tensor([0, 1, 18, 19], dtype=torch.int32), torch.rand(3))
    want = mean_changes(k, v, chosen, own, rows[chosen], keys, values, owners)
    there_k, there_v, there_chosen = there(k, v, chosen)
    at, there_keys, there_values = there(rows[chosen], keys, values)
    got = mean_change_rows(
        there_k,
        there_v,
        there_chosen,
        Angles(*there(*own)),
        at,
        there_keys,
        there_values,
        Owners(*there(*owners)),
    )
    torch.testing.assert_close(got.cpu(), want, atol=1e-4, rtol=1e-4)
