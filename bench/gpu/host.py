"""Where does the host's time go in a pass that the device could do faster than it is told to?

One prompt from host memory, as bench/ttft/cuda.py makes it. Per mode: wall time with recorded
layers and without, how long the device was busy, orders per layer by kind, and the functions that
cost the host most.

    python bench/gpu/host.py --sizes 8k=16 --out bench/results/gpu_host-h200.json
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch
from torch.profiler import ProfilerActivity, profile

from common.gpu_world import STACK, Size, World
from common.results import finish, result_header, versions
from kvweave.fuse import recorded_layers
from kvweave.fuse.prefill import PromptFrame, StoredPrompt
from kvweave.fuse.transfer.rooms import OwnRoom
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import GIB, HostTierConfig, StoreConfig
from kvweave.model.shapes import SHAPES
from ttft.cuda import MODES

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
SHOWN = 12  # functions
MORE_MODES = (("prophetkv", 0.15),)


def main() -> None:
    args = parse_args()
    world = World(args, torch.device(args.device))
    packed = world.packed("raw")
    room = sum(chunk.header.total_bytes for chunk in packed) + GIB // 4
    results: dict[str, Any] = {}
    with KVStore(StoreConfig((HostTierConfig(room),))) as store:
        for chunk in packed:
            store.save(chunk)
        for size in world.sizes:
            for name, ratio in chosen_modes(args.ways):
                run = one_pass(world, store, size, name, ratio)
                results[f"{size.name}_{name}"] = found = look(run, world, args.repeats)
                print(f"{size.name} {name} {ratio:g}: {found['numbers']}", flush=True)
                for line in found["functions"]:
                    print("    " + line, flush=True)
    header = {**result_header("gpu_host", args.device), "versions": versions(*STACK)}
    finish(__doc__, {**header, **results}, args.out)


def one_pass(
    world: World, store: KVStore, size: Size, name: str, ratio: float
) -> Callable[[], None]:
    strategy, chunks = world.strategy(name), world.prompt_chunks(size, "raw")

    def run() -> None:
        kv = world.decoder.new_kv(world.prompt_tokens(size))
        with StoredPrompt(world.spec.num_layers, chunks, store, strategy) as stored:
            frame = PromptFrame(world.preamble, world.question)
            done = stored.prefill(world.decoder, frame, OwnRoom(kv), ratio)
        int(done.logits.argmax())

    return run


def chosen_modes(names: str) -> list[tuple[str, float]]:
    return [mode for mode in (*MODES, *MORE_MODES) if not names or mode[0] in names.split(",")]


def look(run: Callable[[], None], world: World, repeats: int) -> dict[str, Any]:
    most, recorded_layers.MOST_ROWS = recorded_layers.MOST_ROWS, 0  # nothing is recorded
    try:
        plain_ms = wall_ms(run, repeats)
    finally:
        recorded_layers.MOST_ROWS = most
    numbers = {"wall_ms": wall_ms(run, repeats), "wall_unrecorded_ms": plain_ms}
    if world.device.type == "cuda":
        numbers |= orders(run, world.spec.num_layers)
    return {"numbers": numbers, "functions": functions(run, repeats)}


def wall_ms(run: Callable[[], None], repeats: int) -> float:
    for _ in range(3):  # kernels, plans and recordings
        run()
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return round(statistics.median(times) * 1e3, 2)


def orders(run: Callable[[], None], num_layers: int) -> dict[str, float]:
    """Of one run: what the device was told, and for how long it worked (copies apart)."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    busy_us = copied_us = 0.0
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if event.name.startswith("Memcpy"):
                copied_us += event.self_device_time_total
            else:
                busy_us += event.self_device_time_total
        elif event.name.startswith(LAUNCHES):
            counts["launches"] += 1
        elif event.name.startswith("cudaMemcpy"):
            counts["copies"] += 1
        elif "Synchronize" in event.name:
            counts["waits"] += 1
    per_layer = {k: round(counts[k] / num_layers, 1) for k in ("launches", "copies")}
    busy = {"kernels_ms": round(busy_us / 1e3, 2), "copies_ms": round(copied_us / 1e3, 2)}
    return {**busy, **per_layer, "waits": counts["waits"]}


def functions(run: Callable[[], None], repeats: int) -> list[str]:
    """Milliseconds per run, own time, calls. The profile itself slows Python down by half or so."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(repeats):
        run()
    profiler.disable()
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    rows = sorted(((own, calls, at) for at, (_, calls, own, *_) in stats.items()), reverse=True)
    return [
        f"{own / repeats * 1e3:7.2f} ms {calls // repeats:6d}× {Path(at[0]).name}:{at[1]} {at[2]}"
        for own, calls, at in rows[:SHOWN]
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--sizes", default="8k=16,32k=64", help="name=chunks, comma separated")
    parser.add_argument("--ways", default="", help="comma separated; all by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
