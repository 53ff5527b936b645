"""Fresh rows turned and laid in one go, and what they change: as step by step."""

import pytest
import torch

from kvweave.kernels.place import changes, mean_changes, place
from kvweave.kernels.rope import Angles, make_angles, rotate
from kvweave.kernels.types import Owners

ROWS = torch.tensor([2, 3, 7, 11])


def fresh(rotary: int, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    fused = torch.randn(4, 8, 16, generator=g)  # 4 query heads, 2 for keys, 2 for values
    angles = make_angles(ROWS, torch.rand(rotary // 2, generator=g), scale, torch.float32)
    keys, values = torch.randn(2, 13, 2, 16, generator=g)
    return (*torch.split(fused, [4, 2, 2], dim=1), *angles, keys, values)


@pytest.mark.parametrize("rotary", [16, 8])
def test_placed_rows_are_turned_and_no_other_is_touched(rotary: int) -> None:
    q, k, v, cos, sin, keys, values = fresh(rotary)
    turn = Angles(cos, sin)
    before_k, before_v = keys.clone(), values.clone()
    torch.testing.assert_close(place(q, k, v, turn, ROWS, keys, values), rotate(q, turn))
    torch.testing.assert_close(keys[ROWS], rotate(k, turn))
    torch.testing.assert_close(values[ROWS], v)
    others = [i for i in range(13) if i not in ROWS.tolist()]
    assert torch.equal(keys[others], before_k[others])
    assert torch.equal(values[others], before_v[others])


@pytest.mark.parametrize("scale", [1.0, 1.3])  # YaRN turns and stretches
@pytest.mark.parametrize("rotary", [16, 8])
def test_changes_are_what_was_added_before_rope(rotary: int, scale: float) -> None:
    _, k, v, cos, sin, keys, values = fresh(rotary, scale)
    chosen = torch.tensor([0, 2, 3])
    added_k, added_v = torch.randn(2, 3, 2, 16)
    at = ROWS[chosen]
    turn = Angles(cos[chosen], sin[chosen])
    keys[at] = rotate(k[chosen] - added_k, turn)
    values[at] = v[chosen] - added_v
    found = changes(k, v, chosen, turn, at, keys, values)
    torch.testing.assert_close(found[0], added_k, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], added_v, atol=1e-5, rtol=1e-5)


def test_changes_count_for_their_own_chunk_by_their_weight() -> None:
    _, k, v, cos, sin, keys, values = fresh(16)
    chosen, turn = torch.tensor([0, 2, 3]), Angles(cos[[0, 2, 3]], sin[[0, 2, 3]])
    owners = Owners(torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([0.5, 0.2]))
    case = (k, v, chosen, turn, ROWS[chosen], keys, values)
    each = changes(*case)
    found = mean_changes(*case, owners)
    torch.testing.assert_close(found[:, 0], 0.5 * each[:, 0])
    torch.testing.assert_close(found[:, 1], 0.2 * (each[:, 1] + each[:, 2]))


def test_changes_of_keys_in_half_precision_are_no_rounding_of_angles_or_values() -> None:
    """Rows that come as they were stored change by rounding of the keys at most."""
    _, k, v, cos, sin, keys, values = fresh(16)
    k, v, cos, sin, keys, values = (x.bfloat16() for x in (k, v, cos, sin, keys, values))
    all_rows, turn = torch.arange(4), Angles(cos, sin)
    wide = rotate(k.float(), Angles(cos.float(), sin.float()))
    keys[ROWS] = wide.bfloat16()
    values[ROWS] = v + 1
    found = changes(k, v, all_rows, turn, ROWS, keys, values)
    assert found.dtype == torch.float32
    spread = rotate(wide - keys[ROWS].float(), Angles(cos.float(), -sin.float()))
    torch.testing.assert_close(found[0], spread, atol=1e-3, rtol=1e-1)
    assert torch.equal(found[1], v.float() - values[ROWS].float())
