"""How much worse are answers with reuse, by the known answers: exact match, F1, ROUGE-L?

The table of what scored.py wrote:

    python bench/quality/scored_table.py VALUES… --out bench/results/quality_models-h200.json

Scores are in points of 100. `less` is a way's score less full prefill's on the same questions, with
the 95 % interval of its mean over resampled questions. The set "all" has the questions of all sets
but the needles. `f1_auto_worst`: the most negative `less` of F1 that `auto` or `auto-half` has on
any of those sets.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import numpy as np
from rich.console import Console
from rich.table import Table

from common.results import save_run
from kvweave.calibrate.bootstrap import Bootstrap
from quality.scores import NAMES, score, share_contained

ALL = "all"
AUTO = ("auto", "auto-half")
OURS = ("weave-through:0.15", "weave:0.15")
Served = dict[str, Any]  # one way of one question, with its scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("values", type=Path, nargs="+", help="what scored.py wrote")
    parser.add_argument("--note", help="what the run was for")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    head, lines = read_values(args.values)
    note = {} if args.note is None else {"note": args.note}
    result = {**note, **head, "bench": "quality_models", **summarise(lines)}
    show(result)
    if args.out is not None:
        save_run(__doc__, result, args.out, summary)
    print(json.dumps({key: x for key, x in result.items() if key not in ("rows", "ahead")}))


def read_values(paths: Sequence[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a run says of itself, and its questions: of several files by one model on one machine,
    as if they were one. A last line that was cut short is left out."""
    heads, questions = [], []
    for path in paths:
        *texts, last = path.read_text().split("\n")
        head, *lines = map(json.loads, texts)
        if last:
            print(f"{path.name}: the last line is cut short and left out")
        heads.append(head)
        questions += lines
    for name in ("model", "dtype", "device", "commit"):
        if len({head[name] for head in heads}) > 1:
            raise SystemExit(f"the files differ in {name}; make a table of each")
    ways = list(dict.fromkeys(way for head in heads for way in head["ways"]))
    return {**heads[0], "ways": ways, "asked": sum(head["asked"] for head in heads)}, questions


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the last run says in one number."""
    return {"f1_auto_worst": runs[-1]["f1_auto_worst"]}


def summarise(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows of every set and way, and what follows from them."""
    served = [(line, serve(line)) for line in lines]
    sets = {
        name: [each for line, each in served if line["set"] == name]
        for name in dict.fromkeys(line["set"] for line in lines)
    }
    needles = {line["set"] for line in lines if line["needs_all"]}
    whole = [each for line, each in served if line["set"] not in needles]
    if whole:
        sets[ALL] = whole
    rows = [row for name, asked in sets.items() for row in rows_of(name, asked)]
    drops = [
        row["less"]["f1"][0]
        for row in rows
        if row["way"] in AUTO and row["set"] not in (ALL, *needles)
    ]
    return {
        "questions": {name: len(asked) for name, asked in sets.items()},
        "f1_auto_worst": min(drops) if drops else None,
        "rows": rows,
        "ahead": [found for ours in OURS for found in ahead_of_others(whole, ours)],
    }


def serve(line: dict[str, Any]) -> dict[str, Served]:
    """Every way of a question with its scores; `auto` as it would be served."""
    full = {**line["ways"]["full"], "kl": 0.0, "flips": False}
    served: dict[str, Served] = {**line["ways"], "full": full}
    for name, (way, close_call) in line["auto"].items():
        taken = served[way]
        if way == "full":
            served[name] = {**full, "exact": True, "close": False}
        elif taken["lead"] < close_call:
            work = taken["work"] + full["work"]
            served[name] = {**full, "work": work, "exact": False, "close": True}
        else:
            served[name] = {**taken, "exact": False, "close": False}
    return {name: {**each, **_scores(line, each["text"])} for name, each in served.items()}


def _scores(line: dict[str, Any], text: str) -> dict[str, float]:
    """Points of 100."""
    answer = text.strip()
    if line["is_line"]:
        answer = answer.split("\n")[0]
    golds = line["golds"]
    if line["needs_all"]:
        return {"contained": 100 * share_contained(answer, golds)}
    return {name: 100 * value for name, value in score(answer, golds).items()}


def rows_of(set_name: str, asked: Sequence[dict[str, Served]]) -> list[dict[str, Any]]:
    """A row for each way that all questions of a set have."""
    resampled = Bootstrap(len(asked))
    names = [name for name in NAMES if name in asked[0]["full"]]
    rows = []
    for way in (way for way in asked[0] if all(way in each for each in asked)):
        mine, full = [each[way] for each in asked], [each["full"] for each in asked]
        less = {
            name: [round(x, 2) for x in resampled.mean(_values(mine, name) - _values(full, name))]
            for name in names
        }
        row = {
            "set": set_name,
            "way": way,
            "n": len(asked),
            **{name: round(float(_values(mine, name).mean()), 2) for name in names},
            "less": less,
            "same": round(
                float(np.mean([each[way]["text"] == each["full"]["text"] for each in asked])), 4
            ),
            "kl": round(float(_values(mine, "kl").mean()), 5),
            "flips": round(float(_values(mine, "flips").mean()), 4),
            "nll": round(float(_values(mine, "nll").mean()), 4),
            "work": round(float(_values(mine, "work").mean()), 4),
        }
        for name in ("exact", "close"):
            if name in mine[0]:
                row[name] = round(float(_values(mine, name).mean()), 4)
        rows.append(row)
    return rows


def ahead_of_others(asked: Sequence[dict[str, Served]], ours: str) -> list[dict[str, Any]]:
    """By how much one of ours is ahead of each other strategy at its ratio, question by question:
    lower KL, higher F1."""
    if not asked or ours not in asked[0]:
        return []
    _, _, ratio = ours.partition(":")
    others = [
        way
        for way in asked[0]
        if way.endswith(f":{ratio}") and "/" not in way and way not in (*OURS, *AUTO)
    ]
    resampled = Bootstrap(len(asked))
    found = []
    for other in others:
        mine, theirs = [each[ours] for each in asked], [each[other] for each in asked]
        kl = resampled.mean(_values(theirs, "kl") - _values(mine, "kl"))
        f1 = resampled.mean(_values(mine, "f1") - _values(theirs, "f1"))
        found.append(
            {
                "ours": ours,
                "other": other,
                "kl": [round(x, 5) for x in kl],
                "f1": [round(x, 2) for x in f1],
                "work": round(float((_values(mine, "work") - _values(theirs, "work")).mean()), 4),
            }
        )
    return found


def _values(served: Sequence[Served], name: str) -> np.ndarray:
    return np.array([float(each[name]) for each in served])


def show(result: dict[str, Any]) -> None:
    """One table per set."""
    for name, count in result["questions"].items():
        table = Table(title=f"{name}: {count} questions, points of 100")
        for column in ("way", "work", "EM", "F1", "ROUGE-L", "contained", "less (95 %)", "KL"):
            table.add_column(column, justify="left" if column == "way" else "right")
        for row in (row for row in result["rows"] if row["set"] == name):
            scores = [f"{row[each]:.1f}" if each in row else "" for each in NAMES]
            mean, low, high = row["less"].get("f1") or row["less"]["contained"]
            less = f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
            table.add_row(row["way"], f"{row['work']:.0%}", *scores, less, f"{row['kl']:.4f}")
        Console(width=110).print(table)
    for each in result["ahead"]:
        print(f"{each['ours']} ahead of {each['other']}: KL {each['kl']}, F1 {each['f1']}")


if __name__ == "__main__":
    main()
