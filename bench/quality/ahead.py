"""Is one strategy ahead of all others, at equal ratio and at equal work? From a result of quality.

At equal work: between two of its ratios a strategy's share of the KL gap recovered is taken to lie
on the straight line between them (it lies above: gains fall with work). Beyond its last ratio the
line goes to full prefill, which was not measured: `measured` says which cells do not rest on that.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

from common.results import finish, read_results

OURS = ("weave", "weave-deep")
Point = tuple[float, float]  # work, % of the KL gap recovered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="what run.py or join.py wrote")
    parser.add_argument("--run", type=int, default=-1, help="which of its runs; the last")
    parser.add_argument("--strategy", default="weave")
    parser.add_argument("--encodings", help="of these alone, comma separated")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cells = read_results(args.result)["runs"][args.run]["cells"]
    if args.encodings is not None:
        cells = [cell for cell in cells if cell["encoding"] in args.encodings.split(",")]
    found = compare(cells, args.strategy)
    for kind in ("ratio", "work"):
        behind = [each for each in found if each[f"ahead_by_{kind}"] <= 0]
        print(f"at equal {kind}: ahead of all others in {len(found) - len(behind)} of {len(found)}")
        if kind == "work":
            print(f"  {sum(each['measured'] for each in found)} of them within what was measured")
        for each in behind:
            print(f"  behind by {-each[f'ahead_by_{kind}']:.2f}: {_name(each)}")
    found_all = {"bench": "quality_ahead", "strategy": args.strategy, "cells": found}
    finish(__doc__, found_all, args.out)


def compare(cells: Sequence[dict[str, Any]], ours: str) -> list[dict[str, Any]]:
    """Per set, encoding and ratio: points by which `ours` is ahead of the best of the others."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        groups[cell["set"], cell["encoding"]].append(cell)
    found = []
    for (name, encoding), group in sorted(groups.items()):
        mine = sorted((c for c in group if c["strategy"] == ours), key=lambda c: c["ratio"])
        if not mine:
            continue
        plain = next(c for c in group if c["strategy"] == "reuse")
        curve: list[Point] = [(c["work"], c["recovered"]) for c in (plain, *mine)] + [(1.0, 100.0)]
        for cell in mine:
            others = [c for c in group if c["ratio"] == cell["ratio"] and c["strategy"] not in OURS]
            best = max(others, key=lambda c: c["recovered"])
            dear = min(others, key=lambda c: at(curve, c["work"]) - c["recovered"])
            found.append(
                {
                    "set": name,
                    "encoding": encoding,
                    "ratio": cell["ratio"],
                    "best": best["strategy"],
                    "ahead_by_ratio": round(cell["recovered"] - best["recovered"], 2),
                    "best_for_its_work": dear["strategy"],
                    "ahead_by_work": round(at(curve, dear["work"]) - dear["recovered"], 2),
                    "measured": all(c["work"] <= mine[-1]["work"] for c in others),
                }
            )
    return found


def at(curve: Sequence[Point], work: float) -> float:
    """The curve (ascending in work) at some work."""
    for (left, low), (right, high) in pairwise(curve):
        if work <= right:
            return low + (high - low) * max(0.0, (work - left) / (right - left))
    return curve[-1][1]


def _name(each: dict[str, Any]) -> str:
    return f"{each['set']}, {each['encoding']}, ratio {each['ratio']:g} ({each['best']})"


if __name__ == "__main__":
    main()
