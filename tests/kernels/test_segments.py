"""Attention over segments = attention over the same keys side by side."""

import random

import pytest
import torch

from kvweave.kernels.rope import Angles
from kvweave.kernels.segments import attend_segments
from worlds.segments import Heads, SegmentWorld, random_world


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shifted", [0.0, 0.7])
def test_segments_give_what_a_dense_prompt_gives(seed: int, shifted: float) -> None:
    """Some rows of each prompt: of the front, recomputed ones inside chunks, of the question."""
    rng = random.Random(seed)
    world = random_world(seed, Heads(rotary=16 if seed % 2 else 8), shifted=shifted)
    wanted = [
        sorted(rng.sample(p.own_positions, rng.randint(1, len(p.own_positions))))
        for p in world.prompts
    ]
    at, ranks, rows = world.batch(wanted)
    q = world.queries(at)
    ours = attend_segments(q, at, ranks, rows, world.key_pages, world.value_pages, world.turn)
    torch.testing.assert_close(ours, world.dense(q, at, rows))


@pytest.mark.parametrize("seed", range(20, 26))
@pytest.mark.parametrize("shifted", [0.0, 0.7])
def test_a_decode_step_over_segments_is_one_over_dense_prompts(seed: int, shifted: float) -> None:
    world = random_world(seed, page=16, shifted=shifted)
    at, ranks, rows = world.batch(world.last_rows())
    q = world.queries(at)
    ours = attend_segments(q, at, ranks, rows, world.key_pages, world.value_pages, world.turn)
    torch.testing.assert_close(ours, world.dense(q, at, rows))


def test_one_copy_serves_a_chunk_wherever_it_stands() -> None:
    """Also twice in one prompt."""
    world = SegmentWorld(Heads(), 4, seed=1)
    chunk = world.add_chunk(10)
    world.add_prompt([chunk], front=1, ratio=0.0)
    world.add_prompt([chunk, chunk], front=30, ratio=0.0)
    held = {tuple(each.pages) for prompt in world.prompts for each in prompt.chunks}
    assert len(held) == 1
    at, ranks, rows = world.batch(world.last_rows())
    q = world.queries(at)
    ours = attend_segments(q, at, ranks, rows, world.key_pages, world.value_pages, world.turn)
    torch.testing.assert_close(ours, world.dense(q, at, rows))


def test_what_a_row_does_not_see_is_never_read() -> None:
    """Replaced rows are masked, keys behind a row are not touched: NaN in them changes nothing."""
    world = SegmentWorld(Heads(), 4, seed=2)
    first, second = world.add_chunk(12), world.add_chunk(12)
    prompt = world.add_prompt([first, second], front=3, ratio=0.5)
    early = [p for p in prompt.own_positions if p < 15][-1:]
    at, ranks, rows = world.batch([early])
    q = world.queries(at)
    pages = world.key_pages, world.value_pages
    clean = attend_segments(q, at, ranks, rows, *pages, world.turn)
    for part in pages:
        part[list(prompt.chunks[1].pages)] = float("nan")
    torch.testing.assert_close(attend_segments(q, at, ranks, rows, *pages, world.turn), clean)


def test_half_precision_stays_close_far_from_the_front() -> None:
    """Queries are turned in single precision, by thousands of positions."""
    world = SegmentWorld(Heads(dim=64, rotary=64), 16, seed=3)
    chunk = world.add_chunk(400)
    world.add_prompt([chunk], front=2000, behind=3, ratio=0.1)
    at, ranks, rows = world.batch(world.last_rows())
    q = world.queries(at)
    pages = world.key_pages.bfloat16(), world.value_pages.bfloat16()
    ours = attend_segments(
        q.bfloat16(), at, ranks, rows, *pages, lambda p: Angles(*(x.float() for x in world.turn(p)))
    )
    assert ours.dtype == torch.bfloat16
    wanted = world.dense(q, at, rows)
    off = (ours.double() - wanted).norm() / wanted.norm()
    assert off < 3e-2, f"off by {off:.3f}"


def test_a_batch_without_rows_has_no_answer() -> None:
    world = SegmentWorld(Heads(), 4, seed=4)
    empty = torch.zeros(0, dtype=torch.int64)
    q = torch.zeros(0, 8, 16, dtype=torch.float64)
    ours = attend_segments(q, empty, empty, [], world.key_pages, world.value_pages, world.turn)
    assert ours.shape == q.shape


@pytest.mark.parametrize("shifted", [0.0, 0.7])
@pytest.mark.parametrize("lifted", [False, True])
@pytest.mark.parametrize("fold", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_chunks_in_8_bits_give_what_their_decoded_keys_and_values_give(
    seed: int, fold: int, lifted: bool, shifted: float
) -> None:
    """And that is near what whole ones give."""
    rng = random.Random(seed)
    world = random_world(seed, Heads(rotary=16 if seed % 2 else 8), shifted=shifted)
    coded = world.coded(fold, world.lift() if lifted else None)
    wanted = [
        sorted(rng.sample(p.own_positions, rng.randint(1, len(p.own_positions))))
        for p in world.prompts
    ]
    at, ranks, rows = world.batch(wanted)
    q = world.queries(at)
    own = world.key_pages, world.value_pages
    ours = attend_segments(q, at, ranks, rows, *own, world.turn, coded)
    decoded = attend_segments(q, at, ranks, rows, *world.decoded(coded), world.turn)
    torch.testing.assert_close(ours, decoded, atol=1e-6, rtol=1e-5)
    dense = world.dense(q, at, rows)
    assert (ours - dense).norm() / dense.norm() < 0.03


def test_half_precision_over_codes_stays_close() -> None:
    world = SegmentWorld(Heads(dim=64, rotary=64), 16, seed=3)
    chunk = world.add_chunk(400)
    world.add_prompt([chunk], front=2000, behind=3, ratio=0.1)
    at, ranks, rows = world.batch(world.last_rows())
    q = world.queries(at)
    own = world.key_pages.bfloat16(), world.value_pages.bfloat16()
    ours = attend_segments(
        q.bfloat16(), at, ranks, rows, *own,
        lambda p: Angles(*(x.float() for x in world.turn(p))), world.coded(2, world.lift()),
    )  # fmt: skip
    assert ours.dtype == torch.bfloat16
    wanted = world.dense(q, at, rows)
    assert (ours.double() - wanted).norm() / wanted.norm() < 4e-2
