"""Is our own full prefill on a GPU a strong baseline?

Every speed-up on the GPU is over this, so it must not be slow: with our kernels, and in the same
run with plain PyTorch in their place. `fixed` is what `engine.exact` makes of it, `decode` a token
behind the prompt, not from a recording. A decoder of a named shape with random weights.

    python bench/gpu/prefill.py --out bench/results/gpu_prefill-h200.json
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch

from common.results import finish, result_header
from kvweave.kernels import dispatch, fixed_order
from kvweave.model.decoder import Decoder
from kvweave.model.rows import Rows
from kvweave.model.shapes import SHAPES, random_decoder

SHAPE = "llama-3.1-8b"


def main() -> None:
    args = parse_args()
    decoder = random_decoder(SHAPES[SHAPE], torch.device("cuda"), torch.bfloat16)
    results: dict[str, Any] = {}
    for tokens in args.tokens:
        row: dict[str, float] = {}
        for name in ("kernels", "plain", "fixed"):
            with as_named(name):
                pairs = [prefill(decoder, tokens) for _ in range(args.repeats + 1)][1:]
            row[f"{name}_ms"] = round(1e3 * statistics.median(each[0] for each in pairs), 1)
            row[f"{name}_decode_ms"] = round(1e3 * statistics.median(each[1] for each in pairs), 2)
        print(tokens, row, flush=True)
        results[f"prefill_{tokens // 1024}k"] = row
    finish(__doc__, {**result_header("gpu_prefill", "cuda"), "shape": SHAPE, **results}, args.out)


@contextmanager
def as_named(name: str) -> Iterator[None]:
    """Compute in here with our kernels, without them, or with sums in one order."""
    found, switched = dispatch.find_spec, list(fixed_order._fixed)
    dispatch.has_triton.cache_clear()
    if name == "plain":
        dispatch.find_spec = lambda name: None
    elif name == "fixed":
        fixed_order.fix_order()
    try:
        yield
    finally:
        dispatch.find_spec = found
        dispatch.has_triton.cache_clear()
        fixed_order._fixed[:] = switched


def prefill(decoder: Decoder, tokens: int) -> tuple[float, float]:
    """Seconds of a prompt, and of a token behind it."""
    ids = torch.randint(0, 100_000, (tokens + 1,)).tolist()
    kv = decoder.new_kv(tokens + 1)
    took_s = []
    for start, end in ((0, tokens), (tokens, tokens + 1)):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        decoder.forward([Rows(ids[start:end], range(start, end), kv, [end - start - 1])])
        torch.cuda.synchronize()
        took_s.append(time.perf_counter() - began_s)
    return took_s[0], took_s[1]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
