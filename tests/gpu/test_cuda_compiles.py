"""Requests of lengths that were never seen wait for no compiler.

Needs bare PyTorch with Triton, transformers and a CUDA device: `pytest -m gpu tests/gpu`.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of PyTorch")

from triton import knobs

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest
from kvweave.model.load import load_decoder
from worlds.engine import ids, plain
from worlds.fused import CHUNKS, World, answer
from worlds.tiny_models import make_model_folder

pytestmark = pytest.mark.gpu

CFG = EngineConfig(page_tokens=16, pool_tokens=1 << 14, max_running=8)
NUM_PAGES = 128
# 1, multiples of 16, and what is neither, as rows, pages and tokens of a prompt
LENGTHS = (1, 2, 5, 8, 9, 15, 16, 17, 31, 32, 48, 100, 241, 250, 256, 257, 320, 496, 512, 700)


@contextmanager
def compiled() -> Iterator[list[str]]:
    """Kernels that are compiled meanwhile, or found in Triton's cache on disk."""
    found: list[str] = []

    def heard(**told: Any) -> None:
        src = told["src"]
        found.append(f"{src.name} {src.signature} {src.constants} {src.attrs}")

    before = knobs.compilation.listener
    knobs.compilation.listener = heard
    try:
        yield found
    finally:
        knobs.compilation.listener = before


def asked_all(engine: Engine, requests: list[EngineRequest]) -> None:
    for request in requests:
        answer(engine.submit(request))


def world_of(tmp_path: Path) -> World:
    folder = make_model_folder(tmp_path, "llama", max_position_embeddings=2048, head_dim=64)
    return World(load_decoder(folder, device="cuda", dtype="bfloat16"), tmp_path / "kv")


@contextmanager
def warm_engine(world: World, cfg: EngineConfig) -> Iterator[Engine]:
    with Engine(world.decoder, cfg) as engine:
        until_s = time.monotonic() + 200
        while not engine.is_warm:
            assert time.monotonic() < until_s, "kernels are compiled by now"
            time.sleep(0.01)
        yield engine


@pytest.mark.parametrize("scattered", [False, True])
def test_prompts_of_any_length_wait_for_no_compiler(tmp_path: Path, scattered: bool) -> None:
    """The first of all included: one row, a few and many each have kernels of their own, and so
    have pages side by side."""
    world = world_of(tmp_path)
    with warm_engine(world, replace(CFG, pool_tokens=16 * NUM_PAGES)) as engine:
        taken = scatter(engine) if scattered else []
        with compiled() as found:
            for length in LENGTHS:
                asked_all(engine, [plain([n % 97 for n in range(length)], max_tokens=3)])
        engine.run_alone(lambda: engine._allocator.release(taken))
        engine.run_alone(engine.check_integrity)
    world.store.close()
    assert not found


def scatter(engine: Engine) -> list[int]:
    """Every second page is taken, so that those of later prompts lie apart. Gives these."""

    def take() -> list[int]:
        pages = engine._allocator.take(NUM_PAGES)
        assert pages is not None, "nobody has any"
        engine._allocator.release(pages[::2])
        return pages[1::2]

    return engine.run_alone(take)


@pytest.mark.parametrize("shared", ["raw", "int8", None])
@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_fused_prompts_of_any_size_wait_for_no_compiler(
    tmp_path: Path, shared: str | None, ratio: float
) -> None:
    world, rng = world_of(tmp_path), random.Random(1)
    how: dict[str, Any] = {"share_chunks": shared is not None, "shared_codec": shared or "raw"}

    def of(chunks: int, asked: int) -> EngineRequest:
        request = world.request(rng.choices(CHUNKS, k=chunks), "weave" if ratio else "reuse", ratio)
        return replace(request, question=ids(rng, asked))

    with warm_engine(world, replace(CFG, **how)) as engine:
        for chunks, asked in ((3, 5), (3, 5), (3, 1), (12, 60), (12, 60), (20, 9), (3, 40)):
            asked_all(engine, [of(chunks, asked)])
        with compiled() as found:
            for asked in (1, 2, 4, 7, 8, 15, 16, 17, 30, 32, 33, 47, 64, 65, 80, 96, 120):
                asked_all(engine, [of(rng.randint(1, 20), asked)])
    world.store.close()
    assert not found


def test_the_listener_hears(tmp_path: Path) -> None:
    """Else the tests above would hold whatever is compiled."""
    import triton
    import triton.language as tl

    @triton.jit
    def double(x_ptr, num, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        at = tl.arange(0, SIZE)
        tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, at < num, other=0.0), at < num)

    x = torch.ones(64, device="cuda")
    with compiled() as found:
        for num in (5, 16, 1, 6, 32):
            double[(1,)](x, num, SIZE=64)
    assert len(found) == 3
