"""What a codec costs and saves, and whether layer 0 is cheaper to compute (bench/tiers/run.py)."""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from common.measuring import alternate
from kvweave.kv.format.codec import CODECS, DTYPES, Codec, LayerKV, open_codec
from kvweave.kv.format.header import ALGORITHM, LayerShape, checksum_of


def bench_codecs(args: argparse.Namespace) -> list[dict[str, object]]:
    """One layer at a time, in memory; GB/s count the model's bytes, not the stored ones."""
    shape = LayerShape(args.tokens, args.heads, args.dim, args.dtype)
    dtype = DTYPES[args.dtype]
    generator = torch.Generator().manual_seed(1)
    size = (args.tokens, args.heads, args.dim)
    kv = LayerKV(*(torch.randn(size, generator=generator).to(dtype) for _ in range(2)))
    raw_bytes = open_codec("raw").num_bytes(shape)
    rows: list[dict[str, object]] = []
    for name, codec in CODECS.items():
        data = torch.empty(codec.num_bytes(shape), dtype=torch.uint8)
        runs = {
            "encode": lambda c=codec, d=data: [c.encode(kv, d) for _ in range(50)],
            "decode": lambda c=codec, d=data: [c.decode(d, shape) for _ in range(50)],
        }
        speed = {
            what: round(50 * raw_bytes / statistics.median(seconds) / 1e9, 2)
            for what, seconds in alternate(runs, args.repeats).items()
        }
        error = torch.cat(
            [
                (a.float() - b.float()).flatten()
                for a, b in zip(codec.decode(data, shape), kv, strict=True)
            ]
        )
        scale = torch.cat([x.float().flatten() for x in kv]).norm()
        rows.append(
            {
                "codec": name,
                "bytes_per_token": codec.num_bytes(shape) * args.layers / args.tokens,
                "of_raw": round(codec.num_bytes(shape) / raw_bytes, 3),
                "encode_gb_per_s": speed["encode"],
                "decode_gb_per_s": speed["decode"],
                "relative_error": float(f"{float(error.norm() / scale):.2e}"),
            }
        )
    return rows


def bench_layer0(args: argparse.Namespace) -> list[dict[str, object]]:
    """Is layer 0 cheaper to compute from token ids than to bring? It needs no attention: an
    embedding, a norm and the projections. Against it: reading, checking and decoding one layer that
    lies in the page cache. The model must have the shape that was asked for."""
    from kvweave.model.files.locate import locate
    from kvweave.model.load import load_decoder

    decoder = load_decoder(locate(args.model), device="cpu", dtype=args.dtype)
    ids = torch.arange(args.tokens) % decoder.spec.vocab_size
    shape = LayerShape(args.tokens, decoder.spec.num_kv_heads, decoder.spec.head_dim, args.dtype)
    with torch.inference_mode(), tempfile.TemporaryDirectory(dir=args.data) as folder:
        made = decoder.qkv(0, decoder.embed(ids))

        def recompute() -> None:
            for _ in range(20):
                decoder.qkv(0, decoder.embed(ids))

        rows: list[dict[str, object]] = []
        for name in ("raw", "int8"):
            codec = open_codec(name)
            data = torch.empty(codec.num_bytes(shape), dtype=torch.uint8)
            codec.encode(LayerKV(made.k, made.v), data)
            path = Path(folder, name)
            path.write_bytes(data.numpy().tobytes())
            digest = checksum_of(ALGORITHM)
            times = alternate(
                {
                    "bring": partial(bring_layer, path, data, digest, codec, shape),
                    "recompute": recompute,
                },
                args.repeats,
            )
            row = {n: round(statistics.median(t) / 20 * 1e6, 1) for n, t in times.items()}
            rows.append({"codec": name, "bring_us": row["bring"], "recompute_us": row["recompute"]})
    return rows


def bring_layer(
    path: Path,
    data: torch.Tensor,
    digest: Callable[[memoryview], int],
    codec: Codec,
    shape: LayerShape,
) -> None:
    view = memoryview(data.numpy())
    with path.open("rb", buffering=0) as file:
        for _ in range(20):
            os.preadv(file.fileno(), [view], 0)
            digest(view)
            codec.decode(data, shape)
