"""How does the time to the first token follow the speed at which chunk KV comes in?

QCFuse chooses its rows from anchors and the keys of a few layers, and fuses the first layers while
the last are still on their way. ProphetKV looks at every layer before it chooses. The chunk KV lies
in page-locked host memory behind a throttle: a link that delivers so many bytes per second, in the
order that the strategy asks for (anchors, layers that rows are chosen by, the rest).

    python bench/bandwidth/run.py --device cuda --out bench/results/bandwidth-h200.json
    python bench/bandwidth/run.py --plot bench/results/bandwidth-h200.json

`slope` is milliseconds of TTFT per millisecond of loading, fitted over all speeds, `fast_slope` the
same over links of 8 GB/s and more, and `selection_slope` that of the part until the rows are known.
On a link so slow that loading is all there is, every strategy has slope 1 whatever it does: only a
faster one shows what it can hide.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch
from torch import Tensor

from bandwidth.plot import plot
from common.gpu_world import Size, World, wait
from common.results import finish, read_results, result_header
from kvweave.fuse.fuse import fuse
from kvweave.fuse.needs import Needs
from kvweave.fuse.request import classify
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.stitched import stitch
from kvweave.fuse.transfer.pipeline import open_source, taking_order
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import EncodedLayer
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import GIB, HostTierConfig, StoreConfig
from kvweave.kv.transfers import Transfer

SPEEDS = (1, 2, 3, 5, 8, 12, 20, 35, 50)  # GB/s
FAST = 8  # GB/s
MODES = (("qcfuse", 0.15), ("prophetkv", 0.15))


def main() -> None:
    args = parse_args()
    if args.plot is not None:
        plot(read_results(args.plot)["runs"][-1], args.plot.with_suffix(".svg"))
        return
    world = World(args, torch.device(args.device))
    result = {**result_header("bandwidth", args.device), "config": world.config()}
    finish(__doc__, {**result, **measure(world, args.repeats)}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--sizes", default="8k=16", help="name=chunks")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="draw a result instead")
    return parser.parse_args()


class Throttled:
    """A transfer whose bytes come over a slower link. See `Layers` in fuse/sources.py."""

    def __init__(
        self, transfer: Transfer, needs: Needs, num_layers: int, bytes_per_s: float
    ) -> None:
        self._transfer = transfer
        self._started_s = time.perf_counter()
        due, at = {}, 0.0
        names = [name for name in needs.extras if name.startswith("anchors")]
        for name in names:  # of the layers below the deepest probe alone
            sizes = [len(data) for data in transfer.extras(name).values()]
            at += sum(sizes) * needs.probe_depth / num_layers / bytes_per_s
        self._extras_due = at
        for layer in taking_order(needs, num_layers):
            arrived = transfer.wait_layer(layer)
            at += sum(len(each.data) for each in arrived.values()) / bytes_per_s
            due[layer] = at
        self._due = due
        self.seconds = at  # for everything

    def start(self) -> float:
        """The link begins to deliver."""
        self._started_s = time.perf_counter()
        return self._started_s

    def is_ready(self, layer: int) -> bool:
        return time.perf_counter() - self._started_s >= self._due[layer]

    def wait_layer(self, layer: int) -> Mapping[ChunkKey, EncodedLayer]:
        self._sleep_until(self._due[layer])
        return self._transfer.wait_layer(layer)

    def whole(self, keys: Iterable[ChunkKey]) -> None:
        """Never: layers come one by one."""

    def extras(self, name: str) -> Mapping[ChunkKey, Tensor]:
        self._sleep_until(self._extras_due)
        return self._transfer.extras(name)

    def _sleep_until(self, due_s: float) -> None:
        left_s = self._started_s + due_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


def measure(world: World, repeats: int, codec: str = "raw") -> dict[str, Any]:
    """TTFT and the part of it until rows are known, per strategy and speed."""
    size = world.sizes[0]
    packed = world.packed(codec)[: size.chunks]
    total = sum(chunk.header.total_bytes for chunk in packed)
    cells = []
    with KVStore(StoreConfig((HostTierConfig(total + GIB // 4),))) as store:
        for chunk in packed:
            store.save(chunk)
        for name, ratio in MODES:
            for speed in SPEEDS:
                runs = [
                    once(world, store, size, name, ratio, speed, codec) for _ in range(repeats + 1)
                ][1:]
                cell = {"way": name, "ratio": ratio, "gb_s": speed}
                for key in runs[0]:
                    cell[key] = round(statistics.median(run[key] for run in runs), 2)
                cells.append(cell)
                print(" ".join(str(v) for v in cell.values()), flush=True)
    return {"prompt_tokens": world.prompt_tokens(size), "cells": cells, **verdict(cells)}


def verdict(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the cells say about the two."""
    of = {name: [c for c in cells if c["way"] == name] for name, _ in MODES}
    pairs = list(zip(of["qcfuse"], of["prophetkv"], strict=True))
    found = {
        "slope": {name: slope(own, "ttft_ms") for name, own in of.items()},
        "fast_slope": {
            name: slope([c for c in own if c["gb_s"] >= FAST], "ttft_ms")
            for name, own in of.items()
        },
        "selection_slope": {name: slope(own, "selected_ms") for name, own in of.items()},
        "prophetkv_over_qcfuse_ms": {
            str(a["gb_s"]): round(b["ttft_ms"] - a["ttft_ms"], 1) for a, b in pairs
        },
    }
    print(json.dumps(found), flush=True)
    return found


def once(
    world: World, store: KVStore, size: Size, name: str, ratio: float, speed: float, codec: str
) -> dict[str, float]:
    strategy = open_strategy(name, world.facts)
    chunks = world.prompt_chunks(size, codec)
    needs = strategy.needs(world.spec.num_layers)
    request = classify(
        world.preamble.token_ids, [(c.key, c.token_ids) for c in chunks], world.question,
        present={c.key for c in chunks}, first_is_exact=False,
    )  # fmt: skip
    with store.acquire([c.key for c in chunks]) as lease:
        transfer = store.load(lease, extras=needs.extras)
        layers = Throttled(transfer, needs, world.spec.num_layers, speed * 1e9)
        chooses = Noting(strategy.selector)
        wait(world.device)
        started_s = layers.start()
        with open_source(world.decoder, request.placed, layers, needs) as source:
            kv = world.decoder.new_kv(len(request.prompt_ids))
            laid = stitch(world.decoder, request, world.preamble, source, kv)
            fused = fuse(laid, replace(strategy, selector=chooses), ratio)
            int(fused.logits.argmax())
            ended_s = time.perf_counter()
    return {
        "ttft_ms": (ended_s - started_s) * 1e3,
        "selected_ms": (chooses.chosen_s - started_s) * 1e3,  # when the rows were known
        "load_ms": layers.seconds * 1e3,  # what the link needs for everything
    }


class Noting:
    """A selector that notes when it has chosen."""

    in_flight = False

    def __init__(self, selector: Any) -> None:
        self._selector = selector
        self.chosen_s = 0.0

    def needs(self, num_layers: int) -> Needs:
        return self._selector.needs(num_layers)

    def select(self, scene: Any, counts: Sequence[int]) -> list[Tensor]:
        chosen = self._selector.select(scene, counts)
        self.chosen_s = time.perf_counter()
        return chosen


def slope(cells: Sequence[dict[str, Any]], field: str) -> float:
    """Least squares of a time over loading time."""
    xs, ys = [c["load_ms"] for c in cells], [c[field] for c in cells]
    middle_x, middle_y = statistics.fmean(xs), statistics.fmean(ys)
    covered = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
    return round(covered / sum((x - middle_x) ** 2 for x in xs), 3)


if __name__ == "__main__":
    main()
