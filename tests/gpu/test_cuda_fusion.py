"""Fusion on a GPU: the rows that the CPU chooses, and what it makes of them.

Needs bare PyTorch, transformers and a CUDA device: `pytest -m gpu tests/gpu`.
"""

from dataclasses import replace

import pytest
import torch

from kvweave.kernels.column_scores import (
    causal_column_mass,
    column_scores,
    layer_column_scores,
)
from kvweave.model.load import load_decoder
from worlds.fuse import SELECTING, World, make_ids
from worlds.slices import InPages, make_pool
from worlds.tiny_models import make_model_folder

pytestmark = pytest.mark.gpu

CHUNKS = make_ids(2, 40, 1, 130, 25)


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def worlds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[World, World]:
    """One prompt on the CPU and on the GPU; what lies beside the chunk KV is the CPU's for both."""
    folder = make_model_folder(tmp_path_factory.mktemp("models"), request.param)
    cpu = World(load_decoder(folder, device="cpu", dtype="float32"), chunks=CHUNKS, missing={3})
    return cpu, replace(cpu, decoder=load_decoder(folder, device="cuda", dtype="float32"))


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("name", SELECTING)
def test_fusion_on_the_gpu_equals_the_cpu(
    worlds: tuple[World, World], name: str, ratio: float
) -> None:
    (cpu, want), (gpu, ours) = (world.fuse(name, ratio) for world in worlds)
    assert gpu.recomputed == cpu.recomputed
    assert gpu.rows_per_layer == cpu.rows_per_layer
    torch.testing.assert_close(ours.logits.cpu(), want.logits, atol=1e-3, rtol=1e-3)
    for mine, theirs in zip((*ours.keys, *ours.values), (*want.keys, *want.values), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("most", [1, 7, 1000])
@pytest.mark.parametrize("name", ["weave", "fusionrag", "epic"])
def test_slices_on_the_gpu_leave_the_kv_of_one_pass(
    worlds: tuple[World, World], name: str, most: int
) -> None:
    _, world = worlds
    fused, want = world.fuse(name, 0.3)
    ours = InPages(world, name, 0.3, make_pool(world.decoder), 5, pages=60)
    assert ours.prepared.recomputed == fused.recomputed
    while ours.left.left:
        logits = world.decoder.forward([ours.rows(most)])
    made = ours.result(logits[0])
    torch.testing.assert_close(made.logits, want.logits, atol=1e-3, rtol=1e-3)
    for mine, theirs in zip((*made.keys, *made.values), (*want.keys, *want.values), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", SELECTING)
def test_ratio_one_on_the_gpu_is_full_prefill(worlds: tuple[World, World], name: str) -> None:
    _, gpu = worlds
    _, ours = gpu.fuse(name, 1.0)
    torch.testing.assert_close(ours.logits, gpu.full.logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("normaliser", ["full", "context", "chunk"])
def test_column_scores_on_the_gpu_equal_the_cpu(normaliser: str) -> None:
    g = torch.Generator().manual_seed(0)
    q, keys = torch.randn(37, 6, 16, generator=g), torch.randn(700, 2, 16, generator=g)
    own, causal = torch.randn(37, 2, 16, generator=g), torch.ones(37, 37).tril().bool()
    scores = [
        column_scores(
            q.to(device),
            keys.to(device),
            others=[(own.to(device), causal.to(device))],
            chunks=[(0, 300), (300, 700)],
            normaliser=normaliser,  # type: ignore[arg-type]
        ).cpu()
        for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(scores[1], scores[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", ["sum", "mean", "max"])
@pytest.mark.parametrize("normaliser", ["full", "context", "chunk"])
def test_layers_scored_together_on_the_gpu_equal_the_cpu(normaliser: str, rows: str) -> None:
    g = torch.Generator().manual_seed(0)
    q, keys = torch.randn(4, 37, 6, 16, generator=g), torch.randn(4, 700, 2, 16, generator=g)
    own, front = torch.randn(4, 37, 2, 16, generator=g), torch.randn(4, 5, 2, 16, generator=g)
    causal = torch.ones(37, 37).tril().bool()
    scores = [
        layer_column_scores(
            list(q.to(device)),
            list(keys.to(device)),
            others=[(list(own.to(device)), causal.to(device)), (list(front.to(device)), None)],
            chunks=[(0, 300), (300, 700)],
            normaliser=normaliser,  # type: ignore[arg-type]
            rows=rows,  # type: ignore[arg-type]
        ).cpu()
        for device in ("cpu", "cuda")
    ]
    torch.testing.assert_close(scores[1], scores[0], atol=1e-4, rtol=1e-4)


def test_causal_mass_on_the_gpu_equals_the_cpu() -> None:
    g = torch.Generator().manual_seed(0)
    q, keys = torch.randn(350, 6, 16, generator=g), torch.randn(700, 2, 16, generator=g)
    rows = torch.arange(0, 700, 2)
    mass = [causal_column_mass(q.to(d), rows, keys.to(d)).cpu() for d in ("cpu", "cuda")]
    torch.testing.assert_close(mass[1], mass[0], atol=1e-3, rtol=1e-4)
