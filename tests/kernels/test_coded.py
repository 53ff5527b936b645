"""Chunk KV in 8 bits: how far codes are off, and rows that leave them turned on."""

import pytest
import torch

from kvweave.kernels.coded import decode_rows, encode_rows, relocate_coded, scales_between
from kvweave.kernels.place import relocate
from kvweave.kernels.rope import make_angles
from kvweave.kernels.types import CodedPages, RowMoves

PAGES, PAGE, HEADS, DIM, HALF = 9, 8, 2, 20, 8


def empty_pages(lift: torch.Tensor | None = None) -> CodedPages:
    keys, values = torch.zeros(2, PAGES, PAGE, HEADS, DIM // 2, dtype=torch.int16)
    return CodedPages(keys, values, torch.zeros(PAGES, HEADS, PAGE, 2, dtype=torch.float16), lift)


def some_rows(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 30, HEADS, DIM)
    return keys.to(dtype), values.to(dtype)


def uneven_lift() -> torch.Tensor:
    lift = torch.ones(HEADS, DIM)
    lift[:, [3, 3 + HALF]] = 50.0  # these turn together
    lift[:, 17] = 7.0  # this one is never turned
    return lift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_off_by_half_a_step(dtype: torch.dtype) -> None:
    keys, values = some_rows(dtype)
    keys[4], values[7, 1] = 0.0, 0.0  # all of a row, or of a head
    values[9] *= 1e-3
    slots = torch.randperm(PAGES * PAGE)[:30]
    coded = empty_pages()
    encode_rows(keys, values, slots, coded)
    for found, wanted in zip(decode_rows(coded, slots, torch.float32), (keys, values), strict=True):
        step = wanted.float().abs().amax(-1, keepdim=True) / 127
        assert bool(((found - wanted.float()).abs() <= 0.6 * step + 1e-5).all())
    assert bool((coded.keys.flatten(0, 1)[slots[4]] == 0).all())
    rest = torch.ones(PAGES * PAGE, dtype=torch.bool)
    rest[slots] = False
    assert not coded.keys.flatten(0, 1)[rest].any()
    assert not coded.values.flatten(0, 1)[rest].any()
    scales = scales_between(coded, 0, PAGES * PAGE)
    assert not scales[rest].any()
    assert torch.equal(scales_between(coded, 5, 30), scales[5:30])


def test_a_lift_keeps_large_channels_from_the_step_of_the_others() -> None:
    keys, values = some_rows()
    keys[..., [3, 3 + HALF]] += 60.0
    slots, apart = torch.arange(30), []
    for lift in (None, uneven_lift()):
        coded = empty_pages(lift)
        encode_rows(keys, values, slots, coded)
        small = [j for j in range(DIM) if j not in (3, 3 + HALF, 17)]
        apart.append((decode_rows(coded, slots, torch.float32)[0] - keys)[..., small].abs().max())
    assert apart[1] < apart[0] / 10


@pytest.mark.parametrize("lift", [None, uneven_lift()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_from_pages_and_from_codes(lift: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Those of the front as they are, all others decoded and turned on."""
    keys, values = some_rows(dtype)
    slots = torch.randperm(PAGES * PAGE)[:30]
    coded = empty_pages(lift)
    encode_rows(keys, values, slots, coded)
    own_keys, own_values = torch.randn(2, 12, HEADS, DIM).to(dtype)
    which = torch.tensor([0] * 5 + [1] * 10 + [2] * 20)
    moves = RowMoves(torch.cat([torch.arange(5) + 3, slots]), torch.randperm(50)[:35], which)
    turn = make_angles(torch.tensor([0, 7, 900]), torch.rand(HALF), 1.0, torch.float32)
    found, wanted = torch.zeros(2, 2, 50, HEADS, DIM, dtype=dtype)
    relocate_coded(own_keys, own_values, coded, moves, turn, *found)
    raw = [
        torch.cat([own[3:8], each.to(dtype)])
        for own, each in zip(
            (own_keys, own_values), decode_rows(coded, slots, torch.float32), strict=True
        )
    ]
    relocate(*raw, moves._replace(source=torch.arange(35)), turn, *wanted)
    close = 1e-5 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(found, wanted, atol=close, rtol=close)
    nothing = torch.empty(0, dtype=torch.int64)
    relocate_coded(own_keys, own_values, coded, RowMoves(nothing, nothing, nothing), turn, *found)
