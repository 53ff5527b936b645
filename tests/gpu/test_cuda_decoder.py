"""The same decoder on a GPU: what the CPU computes, in every family, batch and precision.

Needs bare PyTorch, transformers and a CUDA device: `pytest -m gpu tests/gpu`.
"""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvweave.fuse.encode.chunk_pass import encode_chunks, encode_prefix
from kvweave.fuse.fused_pass import fused_pass
from kvweave.fuse.request import classify
from kvweave.fuse.sources import StoredChunks
from kvweave.fuse.stitched import stitch
from kvweave.kv.format.keys import KeyContext, make_chunk_key
from kvweave.kv.format.objects import pack_chunk
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from worlds.fuse import Packed
from worlds.tiny_models import VARIANTS, make_model_folder

pytestmark = pytest.mark.gpu

PROMPT = random.Random(7).choices(range(97), k=120)


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def all_logits(decoder: Decoder, ids: list[int]) -> Tensor:
    rows = Rows(ids, range(len(ids)), decoder.new_kv(len(ids)), range(len(ids)))
    return decoder.forward([rows]).cpu()


def test_float32_on_the_gpu_equals_the_cpu(folder: Path) -> None:
    cpu = load_decoder(folder, device="cpu", dtype="float32")
    gpu = load_decoder(folder, device="cuda", dtype="float32")
    torch.testing.assert_close(
        all_logits(gpu, PROMPT), all_logits(cpu, PROMPT), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_worse_than_on_the_cpu(folder: Path, dtype: str) -> None:
    reference = load_decoder(folder, device="cpu", dtype="float32")
    exact = all_logits(reference, PROMPT)
    # with experts only the best row counts: one row sent elsewhere by rounding moves all behind it
    share = 0.0 if reference.spec.experts else 0.5
    cpu, gpu = (
        (all_logits(load_decoder(folder, device=device, dtype=dtype), PROMPT) - exact)
        .abs()
        .mean(dim=1)
        .quantile(share)
        for device in ("cpu", "cuda")
    )
    assert gpu < 1.5 * cpu + 2e-3


def test_a_ragged_batch_equals_one_by_one(folder: Path) -> None:
    decoder = load_decoder(folder, device="cuda", dtype="float32")
    prompts = [PROMPT[:1], PROMPT[3:40], PROMPT]
    batch = [Rows(p, range(len(p)), decoder.new_kv(1), [len(p) - 1]) for p in prompts]
    together = decoder.forward(batch).cpu()
    alone = torch.stack([all_logits(decoder, p)[-1] for p in prompts])
    torch.testing.assert_close(together, alone, atol=1e-3, rtol=1e-3)


def test_slices_and_steps_equal_one_shot(folder: Path) -> None:
    decoder = load_decoder(folder, device="cuda", dtype="float32")
    kv = decoder.new_kv(4)
    bounds = [0, 50, 51, 52, 100, 120]
    parts = [
        decoder.forward([Rows(PROMPT[a:b], range(a, b), kv, range(b - a))])
        for a, b in pairwise(bounds)
    ]
    torch.testing.assert_close(
        torch.cat(parts).cpu(), all_logits(decoder, PROMPT), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("codec", ["raw", "int8", "int4", "fp8"])
def test_woven_chunk_kv_gives_what_the_cpu_gives(folder: Path, codec: str) -> None:
    logits = [
        weave(load_decoder(folder, device=d, dtype="float32"), codec) for d in ("cpu", "cuda")
    ]
    # an int4 value on the edge may round either way on another device; one step is small here
    tolerance = 1e-3 if codec == "raw" else 0.3
    torch.testing.assert_close(logits[1], logits[0], atol=tolerance, rtol=tolerance)


def weave(decoder: Decoder, codec: str) -> Tensor:
    preamble = encode_prefix(decoder, PROMPT[:8])
    chunks = [PROMPT[8:40], PROMPT[40:90], PROMPT[90:100]]
    made = encode_chunks(decoder, preamble, chunks)
    context = KeyContext("test", "float32", codec, "any", tuple(PROMPT[:8]), "any")
    keys = [make_chunk_key(context, ids) for ids in chunks]
    packed = {k: pack_chunk(k, layers, codec) for k, layers in zip(keys, made, strict=True)}
    request = classify(
        PROMPT[:8],
        list(zip(keys, chunks, strict=True)),
        PROMPT[100:],
        present=keys,
        first_is_exact=False,
    )
    kv = decoder.new_kv(1)
    source = StoredChunks(decoder, request.placed, Packed(packed))
    stitched = stitch(decoder, request, preamble, source, kv)
    rows = [20, 21, 60, *range(100, 120)]
    return fused_pass(stitched, rows).logits.cpu()
