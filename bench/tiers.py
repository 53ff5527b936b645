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
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from common import alternate, device_words, report
from kvweave.kv import checksum, objects
from kvweave.kv.codec import CODECS, DTYPES, Codec, LayerKV, open_codec
from kvweave.kv.config import DiskTierConfig, HostTierConfig, StoreConfig, TierConfig
from kvweave.kv.keys import ChunkKey, KeyContext, make_chunk_key
from kvweave.kv.layout import Shape
from kvweave.kv.objects import PackedChunk, pack_chunk
from kvweave.kv.store import KVStore


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.data) as folder:
        loads = bench_loads(Path(folder), args)
    results = {"loads": loads, "codecs": bench_codecs(args), "layer0": bench_layer0(args)}
    show(results)
    config = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "data"}
    report("tiers", "cpu", config, results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder on the disk to measure (default: tmp)")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--chunks-per-request", type=int, default=8)
    parser.add_argument("--io-threads", type=int, default=StoreConfig().io_threads)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2", help="whose layer 0 is recomputed")
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
    """Rows for requests of one chunk and of several: a request ends when all its bytes are in
    memory, so the baseline reads as many files into one buffer before it starts over."""
    disk = KVStore(config(args, DiskTierConfig(root)))
    direct = KVStore(config(args, DiskTierConfig(root, direct_io=True)))
    host = KVStore(config(args, HostTierConfig(3 * args.chunks << 24, pinned=False)))
    for chunk in chunks:
        host.save(chunk)
    names = {chunk.key.hex(): chunk.key for chunk in chunks}
    paths = sorted((root / "objects").rglob("*.kv"))
    kv = torch.empty(2, args.tokens, args.heads, args.dim, dtype=DTYPES[args.dtype])
    rows: list[dict[str, object]] = []
    for per_request in (1, args.chunks_per_request):
        groups = [paths[i : i + per_request] for i in range(0, len(paths), per_request)]
        keys = [[names[path.stem] for path in group] for group in groups]
        runs: dict[str, Callable[[], None]] = {
            "readinto": partial(read_plainly, groups, buffer_for(groups[0])),
            "disk": partial(stream_layers, disk, keys, args.layers),
            "disk O_DIRECT": partial(stream_layers, direct, keys, args.layers),
            "host, views": partial(stream_layers, host, keys, args.layers),
            "host, copied out": partial(stream_layers, host, keys, args.layers, LayerKV(*kv)),
        }
        for cache in ("warm", "cold"):
            if cache == "cold":
                runs = {n: run for n, run in runs.items() if not n.startswith("host")}
            times = timed(runs, args.repeats, paths if cache == "cold" else [])
            rows += describe(times, paths, cache, algorithm, per_request)
    for store in (disk, direct, host):
        store.close()
    return rows


def config(args: argparse.Namespace, tier: TierConfig) -> StoreConfig:
    """One tier alone: nothing is promoted, every load goes to it."""
    return StoreConfig((tier,), io_threads=args.io_threads)


def describe(
    times: dict[str, list[float]], paths: list[Path], cache: str, algorithm: str, per_request: int
) -> list[dict[str, object]]:
    total = sum(path.stat().st_size for path in paths)
    base = statistics.median(times["readinto"])
    return [
        {
            "load": name,
            "chunks_per_request": per_request,
            "cache": cache,
            "checksum": "none" if name == "readinto" else algorithm,
            "gb_per_s": round(total / statistics.median(seconds) / 1e9, 2),
            "of_readinto": round(base / statistics.median(seconds), 2),
            "samples": len(seconds),
        }
        for name, seconds in times.items()
    ]


def buffer_for(paths: list[Path]) -> memoryview:
    return memoryview(bytearray(sum(path.stat().st_size for path in paths)))


def read_plainly(groups: list[list[Path]], buffer: memoryview) -> None:
    """The baseline: one thread, one buffer per request, nothing checked."""
    for group in groups:
        at = 0
        for path in group:
            with path.open("rb", buffering=0) as file:
                at += file.readinto(buffer[at:]) or 0


def stream_layers(
    store: KVStore, requests: list[list[ChunkKey]], num_layers: int, out: LayerKV | None = None
) -> None:
    """One request after another; with `out` each layer is also copied there, as a request does."""
    for keys in requests:
        with store.acquire(keys) as lease:
            transfer = store.load(lease)
            for layer in range(num_layers):
                for encoded in transfer.wait_layer(layer).values():
                    if out is not None:
                        encoded.decode(out)
            assert not transfer.lost, transfer.lost
            assert not lease.missing, lease.missing


def timed(
    runs: dict[str, Callable[[], None]], repeats: int, drop: list[Path]
) -> dict[str, list[float]]:
    """Seconds of each run, in turns. A sample during which other processes took more than a tenth
    of one core is thrown away: a load that works on all cores would suffer more than its baseline.
    On a machine that never rests the disturbed ones are taken after a while, and said to be so.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    give_up_s = time.monotonic() + 2 * repeats
    disturbed = 0
    for run in runs.values():
        run()
    while min(len(seconds) for seconds in times.values()) < repeats:
        for name, run in runs.items():
            drop_cache(drop)
            busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            foreign = busy_seconds() - busy - (time.process_time() - own)
            if foreign <= max(0.1 * elapsed, 0.02) or time.monotonic() > give_up_s:
                times[name].append(elapsed)
                disturbed += foreign > max(0.1 * elapsed, 0.02)
    if disturbed:
        print(f"{disturbed} samples were taken though other processes were busy")
    return times


def busy_seconds() -> float:
    """CPU time all processes of this machine have used."""
    fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


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


# ---- layer 0


def bench_layer0(args: argparse.Namespace) -> list[dict[str, object]]:
    """Is layer 0 cheaper to compute from token ids than to bring? It needs no attention: an
    embedding, a norm and the projections. Against it: reading, checking and decoding one layer that
    lies in the page cache. The model must have the shape that was asked for."""
    from kvweave.model.load import load_decoder
    from kvweave.model.locate import locate

    decoder = load_decoder(locate(args.model), device="cpu", dtype=args.dtype)
    ids = torch.arange(args.tokens) % decoder.spec.vocab_size
    shape = Shape(args.tokens, decoder.spec.num_kv_heads, decoder.spec.head_dim, args.dtype)
    with torch.inference_mode(), tempfile.TemporaryDirectory(dir=args.data) as folder:
        made = decoder.qkv(0, decoder.embed(ids))
        out = LayerKV(torch.empty_like(made.k), torch.empty_like(made.v))

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
            digest = checksum.checksum_of(checksum.best_algorithm())
            times = alternate(
                {
                    "bring": partial(bring_layer, path, data, digest, codec, shape, out),
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
    shape: Shape,
    out: LayerKV,
) -> None:
    view = memoryview(data.numpy())
    with path.open("rb", buffering=0) as file:
        for _ in range(20):
            os.preadv(file.fileno(), [view], 0)
            digest(view)
            codec.decode(data, shape, out)


def show(tables: dict[str, list[dict[str, object]]]) -> None:
    console = Console(width=110)
    for title, rows in tables.items():
        table = Table(title=f"{title}: {device_words()}", title_justify="left")
        for column in rows[0]:
            table.add_column(column, justify="right" if column != next(iter(rows[0])) else "left")
        for row in rows:
            table.add_row(*(str(cell) for cell in row.values()))
        console.print(table)


if __name__ == "__main__":
    main()
