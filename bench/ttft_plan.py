"""What the planner's prices choose where chunk KV lies on disk, beside what each way then took.

The profile is made of this run's own measurements: full prefill, passes over chunk KV that was on
the device, and the speed at which each store was read.
"""

from collections.abc import Sequence
from typing import Any

from kvweave.fuse.request import budget
from kvweave.plan.cost import CostModel, StrategyInfo
from kvweave.plan.profile import Grid, Link, MachineProfile


def choices(world: Any, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per size, disk state and codec: the cheapest by price, and how it compares with full."""
    by = {(c["size"], c["tier"], c["codec"], c["way"]): c for c in cells}
    sizes = [s for s in world.sizes if (s.name, "none", "", "full") in by]
    totals = tuple(world.prompt_tokens(s) for s in sizes)
    full = [by[s.name, "none", "", "full"]["ttft_ms"] / 1e3 for s in sizes]
    question = len(world.question)
    hits = [s.chunks * len(world.chunk_ids[0]) for s in sizes]
    passes = []
    for size, total_s in zip(sizes, full, strict=True):
        cell = by.get((size.name, "device", "raw", "reuse"))
        some = by.get((size.name, "device", "raw", "epic"))
        if cell is None or some is None:
            return {"choices": [], "why": "the device tier was not measured"}
        passes.append([cell["ttft_ms"] / 1e3, some["ttft_ms"] / 1e3, total_s])
    # rows as shares of the prompt differ between sizes: one grid per size
    found = []
    for i, size in enumerate(sizes):
        ys = (question, question + budget(hits[i], 0.15), totals[i])
        prefill = Grid((0,), (totals[i],), [[full[i]]])
        recompute = Grid((totals[i],), ys, [passes[i]])
        for state in ("disk warm", "disk cold"):
            for codec in dict.fromkeys(c["codec"] for c in cells if c["tier"] == state):
                links, loads = {}, {}
                cell = by.get((size.name, state, codec, "reuse"))
                if cell is None:
                    continue
                speed = cell["stages_ms"]["read_gb_s"] * 1e9
                links["disk"] = Link(speed)
                loads["disk"] = int(stored_bytes(world, size, codec))
                profile = MachineProfile(
                    "bench", "bench", world.spec.num_layers, prefill, recompute, links
                )
                costs = CostModel(profile, layer0_free=False)
                prices = {"full": costs.full(totals[i]).seconds}
                for way, ratio in (("reuse", 0.0), ("fusionrag", 0.15)):
                    info = StrategyInfo(way)
                    rows = question + budget(hits[i], ratio)
                    price = costs.fused(info, rows, totals[i], question, hits[i], loads)
                    prices[way] = price.seconds
                best = min(prices, key=lambda way: prices[way])
                took = (
                    by[size.name, "none", "", "full"]
                    if best == "full"
                    else by[size.name, state, codec, best]
                )
                found.append(
                    {
                        "size": size.name, "tier": state, "codec": codec, "choice": best,
                        "priced_ms": {w: round(s * 1e3, 1) for w, s in prices.items()},
                        "took_ms": took["ttft_ms"],
                        "over_full": round(took["ttft_ms"] / 1e3 / full[i], 3),
                    }
                )  # fmt: skip
    worst = max((c["over_full"] for c in found), default=None)
    return {"choices": found, "worst_over_full": worst}


def stored_bytes(world: Any, size: Any, codec: str) -> float:
    from kvweave.kv.codec import open_codec
    from kvweave.kv.layout import Shape

    spec = world.spec
    shape = Shape(len(world.chunk_ids[0]), spec.num_kv_heads, spec.head_dim, "bfloat16")
    return open_codec(codec).num_bytes(shape) * spec.num_layers * size.chunks
