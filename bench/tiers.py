"""How fast does chunk KV come back, how small does it get, and what does a codec cost?

Loads go through the store as a request would do them: acquire, load, wait for layer after layer,
every byte checked. The baseline in the same run is a plain `readinto` of the same files into one
reused buffer, unchecked, by one thread. `warm` has the files in the page cache; `cold` asks the
kernel to drop them first (posix_fadvise DONTNEED, after a sync), which drops them from this machine
but not from any cache below it. Chunks are synthetic, of SmolLM2's shape.

    python bench/tiers.py --data /path/on/the/disk/to/measure
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from common import alternate, device_words, report
from kvweave.kv import checksum, objects
from kvweave.kv.codec import CODECS, DTYPES, LayerKV, open_codec
from kvweave.kv.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.kv.keys import ChunkKey, KeyContext, make_chunk_key
from kvweave.kv.layout import Shape
from kvweave.kv.objects import PackedChunk, pack_chunk
from kvweave.kv.store import KVStore


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.data) as folder:
        loads = bench_loads(Path(folder), args)
    codecs = bench_codecs(args)
    show(loads, codecs)
    config = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "data"}
    report("tiers", "cpu", config, {"loads": loads, "codecs": codecs})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder on the disk to measure (default: tmp)")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--io-threads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def make_chunks(args: argparse.Namespace, algorithm: str) -> list[PackedChunk]:
    """Random keys and values; `algorithm` is the checksum they are written with."""
    objects.best_algorithm = lambda: algorithm  # type: ignore[assignment]
    context = KeyContext("bench", args.dtype, "raw", algorithm, (), "none")
    generator = torch.Generator().manual_seed(0)
    shape = (args.tokens, args.heads, args.dim)
    dtype = DTYPES[args.dtype]

    def values() -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return [
        pack_chunk(
            make_chunk_key(context, [i]), [LayerKV(values(), values()) for _ in range(args.layers)]
        )
        for i in range(args.chunks)
    ]


# ---- loads


def bench_loads(folder: Path, args: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for algorithm in dict.fromkeys([checksum.best_algorithm(), "crc32"]):
        chunks = make_chunks(args, algorithm)
        root = folder / algorithm
        fill(root, chunks)
        rows += measure(root, chunks, args, algorithm)
    return rows


def fill(root: Path, chunks: list[PackedChunk]) -> None:
    with KVStore(StoreConfig((DiskTierConfig(root),))) as store:
        tickets = [store.save(chunk, wait_s=60) for chunk in chunks]
        assert all(ticket.wait(60) for ticket in tickets)
    os.sync()


def measure(
    root: Path, chunks: list[PackedChunk], args: argparse.Namespace, algorithm: str
) -> list[dict[str, object]]:
    paths = sorted((root / "objects").rglob("*.kv"))
    keys = [chunk.key for chunk in chunks]
    total = sum(path.stat().st_size for path in paths)
    plain = memoryview(bytearray(max(path.stat().st_size for path in paths)))
    kv = torch.empty(2, args.tokens, args.heads, args.dim, dtype=DTYPES[args.dtype])

    def readinto() -> None:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                assert file.readinto(plain) == path.stat().st_size

    def cfg(*tiers: object) -> StoreConfig:
        return StoreConfig(tuple(tiers), io_threads=args.io_threads)  # type: ignore[arg-type]

    disk = KVStore(cfg(DiskTierConfig(root)))
    direct = KVStore(cfg(DiskTierConfig(root, direct_io=True)))
    host = KVStore(cfg(HostTierConfig(2 * total, pinned=False)))
    for chunk in chunks:
        host.save(chunk)

    stream = {
        "disk": lambda: stream_layers(disk, keys, args.layers),
        "disk O_DIRECT": lambda: stream_layers(direct, keys, args.layers),
        "host views": lambda: stream_layers(host, keys, args.layers),
        "host copied out": lambda: stream_layers(host, keys, args.layers, LayerKV(kv[0], kv[1])),
    }
    rows: list[dict[str, object]] = []
    for cache in ("warm", "cold"):
        names = [n for n in stream if cache == "warm" or n.startswith("disk")]
        runs = {"readinto": readinto, **{n: stream[n] for n in names}}
        before = (lambda: drop_cache(paths)) if cache == "cold" else (lambda: None)
        times = timed(runs, args.repeats, before)
        base = statistics.median(times["readinto"])
        for name, seconds in times.items():
            median = statistics.median(seconds)
            rows.append(
                {
                    "load": name,
                    "cache": cache,
                    "checksum": "none" if name == "readinto" else algorithm,
                    "gb_per_s": round(total / median / 1e9, 2),
                    "of_readinto": round(base / median, 2),
                }
            )
    for store in (disk, direct, host):
        store.close()
    return rows


def stream_layers(
    store: KVStore, keys: list[ChunkKey], num_layers: int, out: LayerKV | None = None
) -> None:
    """One request after another, a chunk each; with `out` each layer is decoded into it."""
    for key in keys:
        with store.acquire([key]) as lease:
            transfer = store.load(lease)
            for layer in range(num_layers):
                for encoded in transfer.wait_layer(layer).values():
                    encoded.decode(out)
            assert not transfer.lost, transfer.lost


def timed(
    runs: dict[str, Callable[[], None]], repeats: int, before: Callable[[], None]
) -> dict[str, list[float]]:
    """Like `alternate`, with an untimed step before each run."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(-1, repeats):
        for name, run in runs.items():
            before()
            start = time.perf_counter()
            run()
            if i >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def drop_cache(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# ---- codecs


def bench_codecs(args: argparse.Namespace) -> list[dict[str, object]]:
    """One layer at a time, in memory; GB/s count the model's bytes, not the stored ones."""
    shape = Shape(args.tokens, args.heads, args.dim, args.dtype)
    dtype = DTYPES[args.dtype]
    generator = torch.Generator().manual_seed(1)
    size = (args.tokens, args.heads, args.dim)
    kv = LayerKV(*(torch.randn(size, generator=generator).to(dtype) for _ in range(2)))
    raw_bytes = open_codec("raw").num_bytes(shape)
    rows: list[dict[str, object]] = []
    for name, codec in CODECS.items():
        data = torch.empty(codec.num_bytes(shape), dtype=torch.uint8)
        out = LayerKV(torch.empty_like(kv.k), torch.empty_like(kv.v))
        runs = {
            "encode": lambda c=codec, d=data: [c.encode(kv, d) for _ in range(50)],
            "decode": lambda c=codec, d=data, o=out: [c.decode(d, shape, o) for _ in range(50)],
        }
        speed = {
            what: round(50 * raw_bytes / statistics.median(seconds) / 1e9, 2)
            for what, seconds in alternate(runs, args.repeats).items()
        }
        error = torch.cat([(a.float() - b.float()).flatten() for a, b in zip(out, kv, strict=True)])
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


def show(loads: list[dict[str, object]], codecs: list[dict[str, object]]) -> None:
    console = Console()
    for title, rows in (("loads", loads), ("codecs", codecs)):
        table = Table(title=f"{title}: {device_words()}", title_justify="left")
        for column in rows[0]:
            table.add_column(column, justify="right" if column != next(iter(rows[0])) else "left")
        for row in rows:
            table.add_row(*(str(cell) for cell in row.values()))
        console.print(table)


if __name__ == "__main__":
    main()
