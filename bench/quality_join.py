"""One quality table from several runs over the same questions.

A strategy that changed is asked again by itself (`bench/quality.py --strategies weave --values B`)
and takes the place of what it was:

    python bench/quality_join.py A.jsonl B.jsonl --commits 96a212f,c0ffee1 --out RESULT.json

Questions that are not in all files are left out and counted. Full prefill and plain reuse ran in
every file: where they differ by more than rounding, the runs were not over the same prompts, and
nothing is written.
"""

import argparse
from pathlib import Path
from typing import Any

from common import finish, result_header
from quality_stats import FULL, REUSE, read_values, summarise

ROUNDING = 1e-3  # of the KL of plain reuse, and of the NLL of full prefill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="--values of bench/quality.py")
    parser.add_argument("--commits", required=True, help="of each file, comma separated")
    parser.add_argument("--device", required=True, help="what they ran on")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runs = [read_values(path) for path in args.files]
    values, left_out = join([values for _, values in runs])
    made = [
        {"commit": commit, **config, "data": "2wikimultihopqa, hotpotqa, musique"}
        for commit, (config, _) in zip(args.commits.split(","), runs, strict=True)
    ]
    for run in made:
        run["model"] = Path(run["model"]).stem
    header = {**result_header("quality", "cpu"), "device": args.device}
    header["commit"] = made[-1]["commit"]
    finish({**header, "runs": made, "left_out": left_out, "cells": summarise(values)}, args.out)


def join(runs: list[list[dict[Any, Any]]]) -> tuple[list[dict[Any, Any]], int]:
    """Questions that every run asked, later runs' cells over earlier ones'; how many were not."""
    by_run = [{(v["set"], v["number"]): v for v in run} for run in runs]
    every = dict.fromkeys(question for run in by_run for question in run)
    common = [question for question in every if all(question in run for run in by_run)]
    joined = []
    for question in common:
        asked = [run[question] for run in by_run]
        for other in asked[1:]:
            check_same(question, asked[0], other)
        later = [{k: v for k, v in other.items() if k not in (FULL, REUSE)} for other in asked[1:]]
        merged = dict(asked[0])
        for cells in later:
            merged |= cells
        joined.append(merged)
    return joined, len(every) - len(common)


def check_same(question: tuple[str, int], one: dict[Any, Any], other: dict[Any, Any]) -> None:
    """End the program unless both asked the same prompt of the same model."""
    for key, figure in ((FULL, "nll"), (REUSE, "kl")):
        here, there = one[key][figure], other[key][figure]
        if abs(here - there) > ROUNDING * max(1.0, abs(here)):
            raise SystemExit(
                f"{question[0]} {question[1]}: {figure} of {key[1]} is {here:.5f} in one run and "
                f"{there:.5f} in another; they were not asked alike"
            )


if __name__ == "__main__":
    main()
