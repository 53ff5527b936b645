"""Fused requests over shared chunks on a GPU: what copies give, and what a CPU gives.

Needs bare PyTorch, transformers and a CUDA device: `pytest -m gpu tests/gpu`.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest
from kvweave.kernels.place import relocate, relocate_reference
from kvweave.kernels.rope import make_angles
from kvweave.kernels.types import RowMoves
from kvweave.model.load import load_decoder
from worlds.engine import SMALL, plain
from worlds.fused import CHUNKS, World, answer, at_rest
from worlds.mean_drift import move_by_the_mean
from worlds.tiny_models import make_model_folder

pytestmark = pytest.mark.gpu

SHARED = replace(SMALL, share_chunks=True)
LONG = [CHUNKS[2], CHUNKS[0], CHUNKS[3], CHUNKS[2], CHUNKS[1]]


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def thoughts(world: World, cfg: EngineConfig, requests: list[EngineRequest]) -> list[torch.Tensor]:
    """What the model thought of each answer's tokens, all asked at once and once more."""
    with Engine(world.decoder, cfg) as engine:
        for _ in range(2):
            tickets = [engine.submit(request) for request in requests]
            for ticket in tickets:
                answer(ticket)
        at_rest(engine, world)
        return [torch.stack(ticket.distributions).exp() for ticket in tickets]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["llama", "qwen2-yarn", "qwen3"])
@pytest.mark.parametrize("recorded", [0, 64])
def test_shared_chunks_give_what_copies_give(
    tmp_path: Path, variant: str, dtype: str, recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and in a mixed batch; steps played and not."""
    move_by_the_mean(monkeypatch)
    folder = make_model_folder(tmp_path, variant, max_position_embeddings=512, head_dim=64)
    decoder = load_decoder(folder, device="cuda", dtype=dtype)
    world = World(decoder, tmp_path / "kv")
    requests = [
        world.request(LONG, "weave" if ratio else "reuse", ratio) for ratio in (0.0, 0.15, 0.5, 1.0)
    ]
    requests.append(plain(range(1, 40), max_tokens=8))
    requests = [replace(each, forced=tuple(range(3, 11)), watched=8) for each in requests]
    close = {"float32": 2e-3, "bfloat16": 0.25}[dtype]
    cfg = replace(SHARED, recorded_rows=recorded)
    copied = thoughts(world, replace(cfg, share_chunks=False), requests)
    shared = thoughts(world, cfg, requests)
    world.store.close()
    for mine, theirs in zip(shared, copied, strict=True):
        assert (mine - theirs).abs().max() < close
        assert (mine - theirs).abs().mean() < close / 50


@pytest.mark.parametrize("recorded", [0, 64])
def test_a_prompt_that_the_tree_has_whole_reads_no_chunk(tmp_path: Path, recorded: int) -> None:
    """Nothing is left to be shared: its rows look at pages of the tree and its own."""
    folder = make_model_folder(tmp_path, "llama", max_position_embeddings=512, head_dim=64)
    decoder = load_decoder(folder, device="cuda", dtype="float32")
    world = World(decoder, tmp_path / "kv")
    fused = replace(world.request(LONG, "reuse", 0.0), use_tree=True)
    exact = replace(fused, fused=None)
    with Engine(decoder, replace(SHARED, recorded_rows=recorded)) as engine:
        want = answer(engine.submit(exact))
        for _ in range(3):
            assert answer(engine.submit(fused)) == want
        at_rest(engine, world)
    world.store.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8, 128, 64), (2, 64, 32), (3, 80, 20)])
def test_rows_are_relocated_as_the_definition_says(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    heads, dim, half = shape
    g = torch.Generator("cuda").manual_seed(0)
    keys, values = torch.randn(2, 500, heads, dim, device="cuda", generator=g).to(dtype)
    source = torch.randperm(500, device="cuda", generator=g)[:333]
    target = torch.randperm(900, device="cuda", generator=g)[:333]
    which = torch.randint(0, 5, (333,), device="cuda", generator=g)
    inv_freq = torch.rand(half, device="cuda", generator=g)
    turn = make_angles(torch.tensor([0, 3, 700, 9000, -5]).cuda(), inv_freq, 1.0, torch.float32)
    for moves, by in ((RowMoves(source, target, which), turn), (RowMoves(source, target), None)):
        found = torch.zeros(2, 900, heads, dim, dtype=dtype, device="cuda")
        want = torch.zeros_like(found)
        relocate(keys, values, moves, by, *found)
        relocate_reference(keys, values, moves, by, *want)
        torch.testing.assert_close(
            found,
            want,
            atol=1e-2 if dtype != torch.float32 else 1e-5,
            rtol=1e-2 if dtype != torch.float32 else 1e-5,
        )
