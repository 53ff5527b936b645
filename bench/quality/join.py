"""One quality table from several runs over the same questions.

A strategy that changed is asked again by itself (`run.py --strategies weave --values B`) and takes
the place of what it was:

    python bench/quality/join.py A.jsonl B.jsonl --commits 96a212f,c0ffee1 --device "NVIDIA H200" \\
        --torch 2.11.0 --out RESULT.json

Questions that are not in all files are left out and counted. Full prefill and plain reuse ran in
every file: where they differ by more than rounding, the runs were not over the same prompts, and
nothing is written. Products in tf32 (`--tf32`) round more; where that made full prefill write
another answer, each run is judged on its own, and those questions are counted.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import quality.run
from common.results import finish, result_header
from quality.stats import FULL, REUSE, read_values, summarise

# Of the KL of plain reuse, in nats, and of the NLL of full prefill, as a share of it.
ROUNDING, ROUNDING_TF32 = 1e-3, 5e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="--values of bench/quality/run.py")
    parser.add_argument("--commits", required=True, help="of each file, comma separated")
    parser.add_argument("--device", required=True, help="what they ran on")
    parser.add_argument("--torch", required=True, help="its version there")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runs = [read_values(path) for path in args.files]
    values, left_out = join([values for _, values in runs])
    other = sum(bool(value.pop("other_answer")) for value in values)
    made = [
        {"commit": commit, **config, "data": "2wikimultihopqa, hotpotqa, musique"}
        for commit, (config, _) in zip(args.commits.split(","), runs, strict=True)
    ]
    for run in made:
        run["model"] = Path(run["model"]).stem
    header = {**result_header("quality", "cpu"), "device": args.device, "torch": args.torch}
    header["commit"] = made[-1]["commit"]
    joined = {"questions_left_out": left_out, "questions_with_another_answer": other}
    finish(
        quality.run.__doc__,
        {**header, "runs": made, **joined, "cells": summarise(values)},
        args.out,
    )


def join(runs: list[list[dict[Any, Any]]]) -> tuple[list[dict[Any, Any]], int]:
    """Questions that every run asked, later runs' cells over earlier ones'; how many were not."""
    by_run = [{(v["set"], v["number"]): v for v in run} for run in runs]
    every = dict.fromkeys(question for run in by_run for question in run)
    common = [question for question in every if all(question in run for run in by_run)]
    joined = []
    for question in common:
        asked = [run[question] for run in by_run]
        differs = [check_same(question, asked[0], other) for other in asked[1:]]
        later = [{k: v for k, v in other.items() if k not in (FULL, REUSE)} for other in asked[1:]]
        merged = {**asked[0], "other_answer": any(differs)}
        for cells in later:
            merged |= cells
        joined.append(merged)
    return joined, len(every) - len(common)


def check_same(question: tuple[str, int], one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """End the program unless both asked the same prompt of the same model. Whether tf32 made them
    be judged on different answers."""
    in_tf32 = bool(one.get("tf32") or other.get("tf32"))
    allowed = ROUNDING_TF32 if in_tf32 else ROUNDING

    def refuse(what: str, here: float, there: float) -> None:
        raise SystemExit(
            f"{question[0]} {question[1]}: {what} is {here:.5f} in one run and {there:.5f} in "
            "another; they were not asked alike"
        )

    here, there = one[FULL]["nll"], other[FULL]["nll"]
    if abs(here - there) > allowed * max(1.0, abs(here)):
        refuse("nll of full", here, there)
    here, there = one[REUSE]["kl"], other[REUSE]["kl"]
    differs = bool(abs(here - there) > allowed)
    if differs and not in_tf32:
        refuse("kl of reuse", here, there)
    return differs


if __name__ == "__main__":
    main()
