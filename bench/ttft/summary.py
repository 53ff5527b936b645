"""What the cells of a GPU run of bench/ttft/run.py come to: speed-ups, and the planner's choices.

    python bench/ttft/summary.py RESULT.json [--link GB/s]  # last run of it, cut short

`speedup_0_32k_host` and its like are full prefill's time over plain reuse's; `speedup_15_…` over
that of the fastest strategy that asks the question which 15 % of the rows to recompute,
`speedup_15_by_way` has all of them. Chunk KV raw, in page-locked host memory or on the device.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

from common.results import read_results, write_results
from kvweave.model.shapes import SHAPES
from ttft.plan import GATES, Prompts, choices

QUERY_AWARE = ("fusionrag", "qcfuse", "weave", "weave-deep")
Say = Callable[[str], None]


def summarise(result: dict[str, Any], say: Say = print) -> None:
    """Adds its fields to `result`, from `config`, `cells`, `copy_bytes_per_s` and `eager_ms`."""
    config, cells = result["config"], result["cells"]
    full_ms = {c["size"]: c["ttft_ms"] for c in cells if c["way"] == "full"}
    for size, full in full_ms.items():
        for tier in ("host", "device"):
            raw = [c for c in cells if (c["size"], c["tier"], c["codec"]) == (size, tier, "raw")]
            speedups(result, raw, f"{size}_{tier}", say)
        eager = result.get("eager_ms", {}).get(size)
        if eager:
            over = result[f"full_over_eager_{size}"] = round(full / eager, 3)
            say(f"full/eager {size} = {over}")
    around = config["preamble"] + config["question"]
    prompts = Prompts(
        {s: (config["prompt_tokens"][s] - around) // config["chunk_tokens"] for s in full_ms},
        config["chunk_tokens"],
        config["preamble"],
        config["question"],
        SHAPES[config["shape"]].num_layers,
    )
    played = result["planner"] = choices(prompts, cells, result["copy_bytes_per_s"])
    for gate in GATES:
        for case in played[gate]:
            say(f"{gate}: {case}")
    for name in ("first_over_full", "worst_over_full"):
        say(f"planner {name} = {played.get(name)}")


def speedups(result: dict[str, Any], cells: list[dict[str, Any]], where: str, say: Say) -> None:
    by = {c["way"]: c["speedup"] for c in cells if "speedup" in c}
    if "reuse" in by:
        result[f"speedup_0_{where}"] = by["reuse"]
        say(f"speedup_0_{where} = {by['reuse']}")
    asked = {mode: by[mode] for mode in QUERY_AWARE if mode in by}
    if asked:
        best = max(asked, key=lambda mode: asked[mode])
        result[f"speedup_15_{where}"] = asked[best]
        others = {mode: by[mode] for mode in ("epic", *asked) if mode in by}
        result.setdefault("speedup_15_by_way", {})[where] = others
        say(f"speedup_15_{where} = {asked[best]} ({best}; {others})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="gets the fields added")
    parser.add_argument("--link", type=float, help="GB/s from host memory to the device")
    args = parser.parse_args()
    results = read_results(args.result)
    result = results["runs"][-1]
    if args.link is not None:
        result["copy_bytes_per_s"] = round(args.link * 1e9)
        result["copy_bytes_per_s_is"] = "given by hand: the run was cut short"
    summarise(result)
    write_results(results, args.result)


if __name__ == "__main__":
    main()
