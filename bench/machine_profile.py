"""What does prefill cost on this machine, by cached and new tokens?

Other benches price by what it saves (`saved_profile`). And how far off is bilinear interpolation at
points between the measured ones?

    python bench/machine_profile.py --model smollm2 --out bench/results/machine_profile-cpu.json
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from common.files import RESULTS
from common.results import commit, cpu_device, device_words, finish, read_results
from kvweave.kv.tree.node import TreeTier
from kvweave.model.decoder import Decoder
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from kvweave.plan.profile import Grid, MachineProfile, TierLink, profile_from

CACHED = (0, 256, 512, 1024, 2048)
NEW = (32, 128, 512, 1024)
PROMPTS = (512, 1024, 2048)  # recompute: all tokens
ROWS = (32, 128, 512)
BETWEEN = ((128, 64), (384, 256), (768, 768), (1536, 320))  # held out
SAVED = RESULTS / "machine_profile-cpu.json"


def saved_profile(path: Path = SAVED) -> MachineProfile:
    """The profile a bench prices with: the committed one, so that results can be repeated."""
    return profile_from(read_results(path)["runs"][-1]["profile"])


def prefill(decoder: Decoder, cached: int, new: int) -> None:
    """`new` tokens behind `cached` ones. What the cached ones hold does not change the time."""
    kv = decoder.new_kv(cached + new)
    if cached:
        kv.reserve(cached)
        for layer in range(decoder.spec.num_layers):
            kv.keys(layer).zero_()
            kv.values(layer).zero_()
    decoder.forward([Rows([1] * new, range(cached, cached + new), kv, [new - 1])])


def recompute(decoder: Decoder, total: int, rows: int) -> None:
    """`rows` of `total` tokens, spread evenly, as a fused pass computes them."""
    kv = decoder.new_kv(total)
    kv.reserve(total)
    for layer in range(decoder.spec.num_layers):
        kv.keys(layer).zero_()
        kv.values(layer).zero_()
    places = [i * total // rows for i in range(rows)]
    decoder.forward([Rows([1] * rows, places, kv, [rows - 1])])


def measure_grid(
    run: Callable[[int, int], object],
    xs: Sequence[int],
    ys: Sequence[int],
    repeats: int = 5,
    now_s: Callable[[], float] = time.perf_counter,
) -> Grid:
    """Median seconds of `run(x, y)` at each point.

    One round over all points to warm up, then `repeats` rounds: a slow spell of the machine costs
    each point one sample instead of one point all of them. `run` must wait for the device before
    it returns; points that cannot be run are the caller's to avoid.
    """
    points = [(x, y) for x in xs for y in ys]
    times: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for number in range(-1, repeats):
        for x, y in points:
            start = now_s()
            run(x, y)
            if number >= 0:
                times[x, y].append(now_s() - start)
    seconds = [[statistics.median(times[x, y]) for y in ys] for x in xs]
    return Grid(tuple(xs), tuple(ys), seconds)


def host_link(megabytes: int = 64) -> TierLink:
    """Copies inside host memory: what loading from the host tier costs on a CPU."""
    source = torch.empty(megabytes << 20, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    grid = measure_grid(lambda _, __: target.copy_(source), (0,), (1,), repeats=5)
    return TierLink(bytes_per_s=source.numel() / grid.seconds[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    decoder = load_decoder(locate(args.model), device="cpu", dtype="float32")
    grid = measure_grid(lambda x, y: prefill(decoder, x, y), CACHED, NEW, args.repeats)
    sparse = measure_grid(lambda x, y: recompute(decoder, x, y), PROMPTS, ROWS, args.repeats)
    links = {TreeTier.HOST.value: host_link()}
    profile = MachineProfile(
        decoder.revision, device_words(), decoder.spec.num_layers, grid, sparse, links
    )
    errors = []
    table = Table(title=f"{args.model}: seconds of prefill by cached (rows) and new tokens")
    table.add_column("cached")
    for new in NEW:
        table.add_column(str(new), justify="right")
    for cached, row in zip(CACHED, grid.seconds, strict=True):
        table.add_row(str(cached), *(f"{s:.3f}" for s in row))
    Console().print(table)
    for cached, new in BETWEEN:
        truth = measure_grid(
            lambda x, y: prefill(decoder, x, y), (cached,), (new,), args.repeats
        ).seconds[0][0]
        errors.append(grid.at(cached, new) / truth - 1)
        print(f"between: cached {cached}, new {new}: {truth:.3f} s, off by {errors[-1]:+.1%}")
    finish(
        __doc__,
        {
            "bench": "machine_profile",
            "commit": commit(),
            "device": cpu_device(),
            "config": {"model": args.model, "threads": args.threads, "repeats": args.repeats},
            "worst_interpolation_error": round(max(map(abs, errors)), 4),
            "profile": as_dict(profile),
        },
        args.out,
    )


def as_dict(profile: MachineProfile) -> dict[str, object]:
    from dataclasses import asdict

    saved = asdict(profile)
    for name in ("prefill", "recompute"):
        grid: Grid = getattr(profile, name)
        saved[name]["seconds"] = [[round(s, 5) for s in row] for row in grid.seconds]
    return saved


if __name__ == "__main__":
    main()
