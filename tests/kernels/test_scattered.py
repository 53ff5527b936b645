"""Attention of scattered rows by plain products: the same as by the definition, or not at all."""

import pytest
import torch
from torch import Tensor

from kvweave.kernels import attention, scattered
from kvweave.kernels.attention import attend
from kvweave.kernels.scattered import attend_scattered
from kvweave.kernels.types import Segment

HEADS, KV_HEADS, DIM, KEYS = 6, 2, 16, 300
SCALE = DIM**-0.5


def make_world(positions: list[int], size: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(len(positions), HEADS, DIM, generator=g) * size
    keys, values = torch.randn(2, KEYS, KV_HEADS, DIM, generator=g)
    return q, torch.tensor(positions), keys, values


def by_definition(q: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1).double() for x in (keys, values))
    logits = torch.einsum("rhd,nhd->hrn", q.double(), keys) * SCALE
    logits.masked_fill_(torch.arange(KEYS) > positions[:, None], float("-inf"))
    return torch.einsum("hrn,nhd->rhd", logits.softmax(-1), values).float()


@pytest.mark.parametrize(
    ("weights", "fewest", "most"),
    [(1, 1, 1), (300, 7, 16), (HEADS * 5 * 64, 64, 128), (1 << 19, 128, 256)],
)
@pytest.mark.parametrize(
    "positions",
    [[0], [299], [0, 299], [5, 6, 7, 200, 201, 299], [*range(0, 300, 7)], [*range(280, 300)]],
    ids=str,
)
def test_rows_see_what_stands_at_or_before_them_and_nothing_else(
    positions: list[int], weights: int, fewest: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scattered, "BLOCK_WEIGHTS", weights)
    for keys in ("BLOCK_KEYS", "RUN_KEYS"):
        monkeypatch.setattr(scattered, keys, (fewest, most))
    scattered.row_tiles.cache_clear()
    world = make_world(positions)
    done = attend_scattered(*world, SCALE)
    scattered.row_tiles.cache_clear()
    assert done is not None
    torch.testing.assert_close(done, by_definition(*world), atol=1e-5, rtol=1e-5)


def test_what_stands_behind_a_row_cannot_change_it() -> None:
    q, positions, keys, values = make_world([4, 90, 200])
    before = attend_scattered(q, positions, keys, values, SCALE)
    keys[91:], values[91:] = 3.0, 1e6
    after = attend_scattered(q, positions, keys, values, SCALE)
    assert before is not None
    assert after is not None
    assert torch.equal(before[:2], after[:2])


@pytest.mark.parametrize("size", [40.0, 4000.0])
def test_logits_too_large_for_a_bare_exponential_are_refused_and_attended_to_otherwise(
    size: float,
) -> None:
    q, positions, keys, values = make_world([4, 90, 200], size)
    assert attend_scattered(q, positions, keys, values, SCALE) is None
    attended = attend(q, positions, [Segment(0, 3, keys, values)])
    want = by_definition(q, positions, keys, values)
    torch.testing.assert_close(attended, want, atol=1e-4, rtol=1e-4)


def test_scattered_rows_in_float32_take_this_road_where_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_compiled_for", lambda *_: None)
    asked = []

    def spy(*args: object) -> Tensor | None:
        asked.append(args)
        return None

    monkeypatch.setattr(attention, "attend_scattered", spy)
    q, positions, keys, values = make_world([4, 90, 200])
    attend(q, positions, [Segment(0, 3, keys, values)])
    assert len(asked) == 1
    halves = [x.bfloat16() for x in (q, keys, values)]
    attend(halves[0], positions, [Segment(0, 3, halves[1], halves[2])])
    assert len(asked) == 1


def with_logits(logits: Tensor, positions: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows whose logits over the keys are exactly these [N], in every head."""
    _, at, keys, values = make_world(positions)
    q = torch.zeros(len(positions), HEADS, DIM)
    q[..., 0] = 1 / SCALE
    keys[..., 0] = logits[:, None]
    return q, at, keys, values


HOSTILE = {
    "large": torch.full((KEYS,), 60.0),
    "too large": torch.full((KEYS,), 80.0),
    "overflow": torch.full((KEYS,), 100.0),
    "small": torch.full((KEYS,), -40.0),
    "too small": torch.full((KEYS,), -60.0),
    "denormal": torch.full((KEYS,), -95.0),
    "all underflow": torch.full((KEYS,), -200.0),
    "nothing": torch.full((KEYS,), -torch.inf),
    "one dominates": torch.zeros(KEYS).index_fill_(0, torch.tensor([3]), 65.0),
    "one dominates from below": torch.full((KEYS,), -120.0).index_fill_(0, torch.tensor([3]), -30),
    "far apart": torch.linspace(-300, 60, KEYS),
    "one row is too large": torch.zeros(KEYS).index_fill_(0, torch.tensor([150]), 75.0),
    "hidden overflow": torch.zeros(KEYS).index_fill_(0, torch.tensor([95]), 300.0),
    "hidden infinity": torch.zeros(KEYS).index_fill_(0, torch.tensor([95]), torch.inf),
}
REFUSED = {"too large", "overflow", "too small", "denormal", "all underflow", "nothing"}
REFUSED |= {"one row is too large", "hidden overflow", "hidden infinity", "far apart"}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_logits_are_attended_to_exactly_or_refused(name: str) -> None:
    # of the hidden ones, key 95 stands in the edge of a block of which two rows do not see it
    positions = [90, 94, 96] if "hidden" in name else [4, 90, 200, 299]
    world = with_logits(HOSTILE[name], positions)
    done = attend_scattered(*world, SCALE)
    assert (done is None) == (name in REFUSED)
    if done is not None:
        torch.testing.assert_close(done, by_definition(*world), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("positions", [[0], [*range(280, 300)], [*range(0, 300, 7), 297, 298, 299]])
@pytest.mark.parametrize("weights", [1, 2000, 1 << 19])
def test_tiles_hold_every_row_with_every_key_it_sees_once(
    positions: list[int], weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scattered, "BLOCK_WEIGHTS", weights)
    scattered.row_tiles.cache_clear()
    tiles = scattered.row_tiles(tuple(positions), 1)
    scattered.row_tiles.cache_clear()
    seen = torch.zeros(len(positions), KEYS)
    for start, end, blocks in tiles:
        for nth, first, last, edge in blocks:
            part = torch.ones(end - start - nth, last - first)
            if edge is not None:
                part[: len(edge), last - first - edge.shape[1] :] = edge
            seen[start + nth : end, first:last] += part
    assert torch.equal(seen, (torch.arange(KEYS) <= torch.tensor(positions)[:, None]).float())


def test_a_first_block_of_keys_that_overflows_ends_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products: list[int] = []
    add = Tensor.addmm_

    def counting(out: Tensor, *args: Tensor) -> Tensor:
        products.append(1)
        return add(out, *args)

    monkeypatch.setattr(Tensor, "addmm_", counting)
    monkeypatch.setattr(scattered, "BLOCK_KEYS", (64, 64))  # four blocks of keys
    scattered.row_tiles.cache_clear()
    q, positions, keys, values = make_world([4, 90, 200], 4000.0)
    assert attend_scattered(q, positions, keys, values, SCALE) is None
    scattered.row_tiles.cache_clear()
    assert len(products) == KV_HEADS, "those of the first block alone"


def test_rows_as_many_but_elsewhere_have_blocks_of_their_own() -> None:
    for positions in ([4, 90, 200], [5, 90, 200], [4, 91, 200], [4, 90, 299]):
        world = make_world(positions)
        done = attend_scattered(*world, SCALE)
        assert done is not None
        torch.testing.assert_close(done, by_definition(*world), atol=1e-5, rtol=1e-5)
    assert scattered.row_tiles.cache_info().maxsize == 4
