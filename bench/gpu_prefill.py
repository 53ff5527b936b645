"""Is our own full prefill on a GPU a strong baseline? A decoder of a named shape, random weights.

Every speed-up on the GPU is over this, so it must not be slow: with our kernels, and in the same
run with plain PyTorch in their place.

    python bench/gpu_prefill.py --out bench/results/gpu_prefill-h200.json
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from common import finish, result_header
from kvweave.kernels import dispatch
from kvweave.kernels.linear import Linear
from kvweave.model.decoder import Decoder
from kvweave.model.rope import RopeSpec
from kvweave.model.rows import Rows
from kvweave.model.spec import ModelSpec
from kvweave.model.weights import LayerWeights, Weights

LLAMA = ModelSpec(
    family="llama",
    num_layers=32,
    hidden_dim=4096,
    inner_dim=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_context=131072,
    norm_eps=1e-5,
    rope=RopeSpec("llama3", 500000.0, 128, 8.0, 8192, 1.0, 4.0),
)


def main() -> None:
    args = parse_args()
    decoder = random_decoder(LLAMA)
    results: dict[str, Any] = {}
    for tokens in args.tokens:
        row = {}
        for name, on in (("kernels", True), ("plain", False)):
            dispatch.has_triton.cache_clear()
            found = dispatch.find_spec
            dispatch.find_spec = found if on else lambda name: None
            seconds = [prefill(decoder, tokens) for _ in range(args.repeats + 1)][1:]
            dispatch.find_spec = found
            dispatch.has_triton.cache_clear()
            row[f"{name}_ms"] = round(1e3 * sorted(seconds)[len(seconds) // 2], 1)
        print(tokens, row, flush=True)
        results[f"prefill_{tokens // 1024}k"] = row
    finish({**result_header("gpu_prefill", "cuda"), "shape": "llama-3.1-8b", **results}, args.out)


def prefill(decoder: Decoder, tokens: int) -> float:
    ids = torch.randint(0, 100_000, (tokens,)).tolist()
    kv = decoder.new_kv(tokens)
    torch.cuda.synchronize()
    start = time.perf_counter()
    decoder.forward([Rows(ids, range(tokens), kv, [tokens - 1])])
    torch.cuda.synchronize()
    return time.perf_counter() - start


def random_decoder(spec: ModelSpec) -> Decoder:
    """Weights of the right size that keep hidden states finite."""

    def matrix(rows: int, cols: int) -> Linear:
        weight = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        return Linear(weight.mul_(cols**-0.5))

    ones = torch.ones(spec.hidden_dim, device="cuda", dtype=torch.bfloat16)
    e, inner, d = spec.hidden_dim, spec.inner_dim, spec.head_dim
    layers = tuple(
        LayerWeights(
            input_norm=ones,
            qkv=matrix((spec.num_heads + 2 * spec.num_kv_heads) * d, e),
            q_norm=None,
            k_norm=None,
            out=matrix(e, spec.num_heads * d),
            mlp_norm=ones,
            gate_up=matrix(2 * inner, e),
            down=matrix(e, inner),
            experts=None,
        )
        for _ in range(spec.num_layers)
    )
    embedding = torch.randn(spec.vocab_size, e, device="cuda", dtype=torch.bfloat16)
    head = matrix(spec.vocab_size, e)
    return Decoder(spec, Weights(embedding, layers, ones, head, "random"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
