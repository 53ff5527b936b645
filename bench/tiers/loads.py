"""How fast chunk KV comes back, beside a plain `readinto` of the same files (bench/tiers/run.py).

A request ends when all its bytes are in memory and checked; the baseline checks nothing. Runs take
turns, and a sample during which others were busy is thrown away.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from kvweave.kv.format.codec import DTYPES, LayerKV
from kvweave.kv.format.header import ALGORITHM
from kvweave.kv.format.keys import ChunkKey, KeyContext, make_chunk_key
from kvweave.kv.format.objects import PackedChunk, pack_chunk
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig, TierConfig


def bench_loads(folder: Path, args: argparse.Namespace) -> list[dict[str, object]]:
    chunks = make_chunks(args)
    fill(folder / ALGORITHM, chunks)
    return measure(folder / ALGORITHM, chunks, args, ALGORITHM)


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
                        made = encoded.decode()
                        out.k.copy_(made.k)
                        out.v.copy_(made.v)
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


def make_chunks(args: argparse.Namespace) -> list[PackedChunk]:
    """Random keys and values."""
    context = KeyContext("bench", args.dtype, "raw", ALGORITHM, (), "none")
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
