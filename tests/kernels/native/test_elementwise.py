"""Norm, gate and rotation in C against their definitions in PyTorch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.kernels import dispatch
from kvweave.kernels.elementwise import rms_norm, silu_mul
from kvweave.kernels.native import operators as in_c
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.rope import Angles, make_angles, per_head, rotate

ByTorch = Callable[[Callable[[], Tensor]], Tensor]


@pytest.mark.parametrize("num_rows", [0, 1, 3, 700])
@pytest.mark.parametrize("dim", [576, 50, 1])
def test_the_norm_is_the_definitions(
    library: CompiledLibrary, by_torch: ByTorch, num_rows: int, dim: int
) -> None:
    wide, weight = torch.randn(num_rows, 2 * dim + 3) * 40, torch.randn(dim)
    x = wide[:, :dim]
    right = by_torch(lambda: rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(in_c.rms_norm(library, x, weight, 1e-5, None), right)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), right)
    given = torch.full_like(wide, torch.nan)
    rms_norm(x, weight, 1e-5, out=given[:, :dim])
    torch.testing.assert_close(given[:, :dim], right)
    assert given[:, dim:].isnan().all()
    rms_norm(x, weight, 1e-5, out=x)
    torch.testing.assert_close(x, right)


@pytest.mark.parametrize("num_rows", [0, 1, 5, 300])
@pytest.mark.parametrize("inner", [1536, 37, 1])
def test_the_gate_is_the_definitions(library: CompiledLibrary, num_rows: int, inner: int) -> None:
    gate_up = torch.randn(num_rows, 2 * inner) * 20
    gate, up = gate_up.double().chunk(2, dim=-1)
    right = (F.silu(gate) * up).float()
    torch.testing.assert_close(in_c.silu_mul(library, gate_up.clone()), right)
    torch.testing.assert_close(silu_mul(gate_up), right)


def test_gates_far_out_stay_what_they_are(library: CompiledLibrary) -> None:
    gates = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, torch.nan, torch.inf]])
    found = in_c.silu_mul(library, torch.cat([gates, torch.ones_like(gates)], dim=1))
    right = F.silu(gates)
    torch.testing.assert_close(found, right, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_rows", [0, 1, 4, 500])
@pytest.mark.parametrize("rotary", [64, 32, 0])
@pytest.mark.parametrize("wide_angles", [False, True])
def test_a_turn_is_the_definitions(
    library: CompiledLibrary, by_torch: ByTorch, num_rows: int, rotary: int, wide_angles: bool
) -> None:
    frequencies = torch.rand(rotary // 2)
    angles = make_angles(torch.arange(num_rows) * 7, frequencies, 1.0, torch.float32)
    if wide_angles:
        angles = per_head(angles, 3)
    fused = torch.randn(num_rows, 9, 64)
    x = fused[:, 2:5]  # between other heads, as queries and keys lie
    right = by_torch(lambda: rotate(x, angles))
    torch.testing.assert_close(rotate(x, angles), right)
    room = torch.full((num_rows + 5, 3, 64), torch.nan)
    rotate(x, angles, out=room[2 : 2 + num_rows])
    torch.testing.assert_close(room[2 : 2 + num_rows], right)
    assert room[:2].isnan().all()
    assert room[2 + num_rows :].isnan().all()


def test_what_does_not_fit_is_refused_before_memory_is_touched(library: CompiledLibrary) -> None:
    with pytest.raises(ValueError, match="weight"):
        in_c.rms_norm(library, torch.zeros(2, 8), torch.zeros(9), 1e-5, None)
    short = Angles(torch.zeros(3, 1, 4), torch.zeros(3, 1, 4))
    with pytest.raises(ValueError, match="angles"):
        in_c.rotate(library, torch.zeros(2, 1, 8), *short, torch.zeros(2, 1, 8))


def test_other_dtypes_run_the_definition(library: CompiledLibrary) -> None:
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    assert dispatch.find_compiled(x) is None
    assert rms_norm(x, weight, 1e-5).dtype == torch.float64
    assert dispatch.find_compiled(torch.zeros(8, 3).t()) is None
    assert dispatch.find_compiled(torch.zeros(3, 8)) is library
