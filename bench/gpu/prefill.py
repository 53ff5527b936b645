"""Is our own full prefill on a GPU a strong baseline?

Every speed-up on the GPU is over this, so it must not be slow: with our kernels, and in the same
run with plain PyTorch in their place. A decoder of a named shape with random weights.

    python bench/gpu/prefill.py --out bench/results/gpu_prefill-h200.json
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch

from common.results import finish, result_header
from kvweave.kernels import dispatch
from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows
from kvweave.model.shapes import SHAPES, random_decoder

SHAPE = "llama-3.1-8b"


def main() -> None:
    args = parse_args()
    decoder = random_decoder(SHAPES[SHAPE], torch.device("cuda"), torch.bfloat16)
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
    finish(__doc__, {**result_header("gpu_prefill", "cuda"), "shape": SHAPE, **results}, args.out)


def prefill(decoder: Decoder, tokens: int) -> float:
    ids = torch.randint(0, 100_000, (tokens,)).tolist()
    kv = decoder.new_kv(tokens)
    torch.cuda.synchronize()
    start = time.perf_counter()
    decoder.forward([Rows(ids, range(tokens), kv, [tokens - 1])])
    torch.cuda.synchronize()
    return time.perf_counter() - start


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
