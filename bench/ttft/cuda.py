"""How long until the first token on a GPU, and where does the time go?

Every strategy, tier and codec beside our own full prefill, in the same run. Random weights of a
real shape, random prompts of chunks of 510 tokens. Chunk KV is computed by the
model itself, stored through the store, and prefilled from it as a request would be. Each cell is
the median of a few runs after one to warm up; every run ends when the first token is on the host.

What the cells come to is in bench/ttft/summary.py.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.gpu_world import STACK, Size, World, wait
from common.results import finish, result_header, save_run, versions
from common.shapes import eager_seconds
from kvweave.app.auto.machine_profile import copy_bytes_per_s
from kvweave.fuse.fuse import fuse
from kvweave.fuse.prefill import PromptFrame, StoredPrompt
from kvweave.fuse.request import classify
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.stitched import stitch
from kvweave.fuse.transfer.rooms import OwnRoom
from kvweave.kv.format.objects import PackedChunk
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import GIB, DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.model.rows import Rows
from kvweave.model.shapes import SHAPES
from ttft.summary import summarise

MODES = (
    ("reuse", 0.0), ("epic", 0.15), ("fusionrag", 0.15), ("qcfuse", 0.15), ("weave", 0.15),
    ("weave-deep", 0.15),
)  # fmt: skip


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    world = World(args, device)
    result = {**result_header("ttft", args.device), "versions": versions(*STACK)}
    result["config"] = world.config()
    run = Runs(world, args, result)
    run.all()
    finish(__doc__, result, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--sizes", default="8k=16,32k=64", help="name=chunks, comma separated")
    parser.add_argument("--tiers", default="device,host,disk")
    parser.add_argument("--codecs", default="raw,int8,int4")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-eager", action="store_true", help="leave transformers out")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: tmp)")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no cell after this long")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


class CellKey(NamedTuple):
    """What one cell measures."""

    size: Size
    tier: str
    codec: str
    mode: str
    ratio: float


class Runs:
    """Every cell, written down as it comes."""

    def __init__(self, world: World, args: argparse.Namespace, result: dict[str, Any]) -> None:
        self.world, self.args, self.result = world, args, result
        self.cells: list[dict[str, Any]] = []
        result["cells"] = self.cells
        self.full_ms: dict[str, float] = {}
        self.began_s = time.perf_counter()

    def all(self) -> None:
        """What matters most comes first, should the time run out."""
        self.full()
        tiers, codecs = self.args.tiers.split(","), self.args.codecs.split(",")
        with tempfile.TemporaryDirectory(dir=self.args.folder) as folder:
            for codec in codecs:
                packed = self.pack(codec) if {"host", "disk"} & set(tiers) else []
                if "host" in tiers:
                    self.in_host(codec, packed)
                if codec == codecs[0]:
                    if "device" in tiers:
                        self.on_device()
                    self.eager()
                    self.summary()
                if "disk" in tiers:
                    self.on_disk(codec, packed, Path(folder) / codec)
        self.summary()

    def eager(self) -> None:
        """The reference: transformers' own model of this shape."""
        world = self.world
        if world.device.type == "cuda" and not self.args.no_eager:
            prompts = [world.prompt(size) for size in world.sizes]
            eager = eager_seconds(world.spec, world.device, prompts)
            ms = {s.name: round(t * 1e3, 1) for s, t in zip(world.sizes, eager, strict=True)}
            self.result["eager_ms"] = ms
            say(f"eager {ms}")

    def full(self) -> None:
        world = self.world
        for size in world.sizes:
            ids = world.prompt(size)

            def once(ids: list[int] = ids) -> dict[str, float]:
                kv = world.decoder.new_kv(len(ids))
                rows = Rows(ids, range(len(ids)), kv, [len(ids) - 1])
                int(world.decoder.forward([rows])[0].argmax())
                return {}

            self.full_ms[size.name] = self.cell(CellKey(size, "none", "", "full", 0.0), once, 3)

    def on_device(self) -> None:
        """Chunk KV that lies in device memory already."""
        world = self.world
        for size in world.sizes:
            chunks = world.prompt_chunks(size, "raw")
            source = ComputedChunks(world.made[: size.chunks])
            for name, ratio in MODES:
                if name == "qcfuse":  # anchors come from the store
                    continue
                strategy = world.strategy(name)

                def once(
                    strategy: Any = strategy, ratio: float = ratio, chunks: Any = chunks,
                    source: Any = source,
                ) -> dict[str, float]:  # fmt: skip
                    request = classify(
                        world.preamble.token_ids, [(c.key, c.token_ids) for c in chunks],
                        world.question, present={c.key for c in chunks}, first_is_exact=False,
                    )  # fmt: skip
                    kv = world.decoder.new_kv(len(request.prompt_ids))
                    laid = stitch(world.decoder, request, world.preamble, source, kv)
                    fused = fuse(laid, strategy, ratio)
                    int(fused.logits.argmax())
                    return stages(fused.load_s, fused.select_s, fused.pass_s)

                self.cell(CellKey(size, "device", "raw", name, ratio), once)

    def pack(self, codec: str) -> list[PackedChunk]:
        started_s = time.perf_counter()
        packed = self.world.packed(codec)
        size = sum(chunk.header.total_bytes for chunk in packed)
        took_s = time.perf_counter() - started_s
        say(f"{codec}: {len(packed)} chunks, {size / 1e9:.2f} GB, packed in {took_s:.1f} s")
        return packed

    def in_host(self, codec: str, packed: list[PackedChunk]) -> None:
        size = sum(chunk.header.total_bytes for chunk in packed)
        with KVStore(StoreConfig((HostTierConfig(size + GIB // 4),))) as store:
            for chunk in packed:
                store.save(chunk)
            modes = MODES if codec == "raw" else MODES[:1] + MODES[2:3]
            for each in self.world.sizes:
                self.from_store(store, each, "host", codec, modes)
                if codec == "raw":
                    self.from_store(store, each, "host", codec, (("prefix", 0.0),))

    def on_disk(self, codec: str, packed: list[PackedChunk], folder: Path) -> None:
        size = sum(chunk.header.total_bytes for chunk in packed)
        disk = DiskTierConfig(folder, fsync=False)
        cfg = StoreConfig((disk,), io_threads=12, staging_bytes=size + GIB)
        with KVStore(cfg) as store:
            for chunk in packed:
                store.save(chunk, wait_s=60)
            store.flush(120)
            os.sync()
            modes = MODES[:1] + MODES[2:3]
            for each in self.world.sizes:
                for state in ("disk warm", "disk cold"):
                    self.from_store(store, each, state, codec, modes, folder=folder)

    def from_store(
        self,
        store: KVStore,
        size: Size,
        tier: str,
        codec: str,
        modes: Any,
        folder: Path | None = None,
    ) -> None:
        world = self.world
        chunks = world.prompt_chunks(size, codec)
        for name, ratio in modes:
            strategy = world.strategy(name)

            def once(strategy: Any = strategy, ratio: float = ratio) -> dict[str, float]:
                kv = world.decoder.new_kv(world.prompt_tokens(size))
                num_layers = world.spec.num_layers
                with StoredPrompt(num_layers, chunks, store, strategy) as stored:
                    frame = PromptFrame(world.preamble, world.question)
                    done = stored.prefill(world.decoder, frame, OwnRoom(kv), ratio)
                int(done.logits.argmax())
                at = done.record.stages
                found = stages(at.load / 1e3, at.select / 1e3, at.compute / 1e3)
                loaded = sum(done.record.loaded_bytes.values())
                for seconds in done.record.arrived_s.values():
                    found |= {"read_gb_s": loaded / seconds / 1e9, "loaded_mb": loaded / 1e6}
                return found

            def before() -> None:
                if tier == "disk cold":
                    drop(folder)

            slow = tier.startswith("disk")
            key = CellKey(size, tier, codec, name, ratio)
            self.cell(key, once, 3 if slow else None, before)

    def cell(
        self,
        key: CellKey,
        once: Callable[[], dict[str, float]],
        repeats: int | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> float:
        if time.perf_counter() - self.began_s > self.args.limit_s:
            say(f"no time left for {key.size.name} {key.tier} {key.codec} {key.mode}")
            return float("nan")
        times: list[float] = []
        seen: list[dict[str, float]] = []
        unseen = 0 if key.tier == "disk cold" else 2  # the first warms up, the second records
        for turn in range(-unseen, repeats or self.args.repeats):
            before()
            wait(self.world.device)
            started_s = time.perf_counter()
            found = once()
            took_s = time.perf_counter() - started_s
            if turn >= 0:
                times.append(took_s * 1e3)
                seen.append(found)
        ms = statistics.median(times)
        middle = {k: round(statistics.median(f[k] for f in seen), 2) for k in seen[0]}
        if "compute" in middle:
            middle["rest"] = round(ms - sum(middle[k] for k in ("load", "select", "compute")), 2)
        cell = {
            "size": key.size.name, "tier": key.tier, "codec": key.codec, "way": key.mode,
            "ratio": key.ratio,
            "ttft_ms": round(ms, 2), "best_ms": round(min(times), 2), "stages_ms": middle,
            "times_ms": [round(each, 2) for each in times],
        }  # fmt: skip
        if full := self.full_ms.get(key.size.name):
            cell["speedup"] = round(full / ms, 2)
        self.cells.append(cell)
        say(" ".join(f"{v}" for v in cell.values()))
        if self.args.out is not None:
            save_run(__doc__, self.result, self.args.out)
        return ms

    def summary(self) -> None:
        self.result["copy_bytes_per_s"] = round(copy_bytes_per_s(self.world.decoder))
        summarise(self.result, say)


def stages(load_s: float, select_s: float, compute_s: float) -> dict[str, float]:
    return {"load": load_s * 1e3, "select": select_s * 1e3, "compute": compute_s * 1e3}


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*.kv") if path.is_file())


def drop(folder: Path | None) -> None:
    """Tell the kernel to forget the files' pages."""
    assert folder is not None
    for path in files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def say(line: str) -> None:
    print(line, flush=True)
