"""Means, recovered gaps and paired bootstrap intervals of the quality bench."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Key = tuple[str, str, float]  # encoding, strategy, ratio
FULL: Key = ("-", "full", 0.0)
REUSE: Key = ("isolated", "reuse", 0.0)
FIGURES = ("kl", "flips", "top1", "nll", "f1", "em", "work")
DRAWS = 2000
MIN_GAP_ERRORS = 2.0  # bootstrap standard errors; a share of less than that is a share of noise


def summarise(values: Sequence[dict[Any, Any]]) -> list[dict[str, Any]]:
    """One row per set and cell. Means over questions first, then ratios of means.

    `nll_recovered` is None where the gap it is a share of cannot be told from none.
    """
    rows = []
    for name in dict.fromkeys(v["set"] for v in values):
        asked = [v for v in values if v["set"] == name]
        keys = [key for key in asked[0] if isinstance(key, tuple)]
        table = np.array([[[v[k][f] for f in FIGURES] for k in keys] for v in asked])  # [n, K, F]
        draws = np.random.default_rng(0).integers(0, len(asked), (DRAWS, len(asked)))
        means = table.mean(0)
        drawn = np.stack([table[d].mean(0) for d in draws])  # [DRAWS, K, F]
        full, reuse = keys.index(FULL), keys.index(REUSE)
        gap = means[reuse, 3] - means[full, 3]
        gaps = drawn[:, reuse, 3] - drawn[:, full, 3]
        has_gap = len(asked) > 1 and abs(gap) > MIN_GAP_ERRORS * gaps.std()
        for k, key in enumerate(keys):
            mean = dict(zip(FIGURES, means[k].tolist(), strict=True))
            recovered = 100 * (1 - drawn[:, k, 0] / drawn[:, reuse, 0])
            nll, nll_ci = None, None
            if has_gap:
                nll = round(100 * (means[reuse, 3] - mean["nll"]) / gap, 2)
                nll_ci = _interval(100 * (drawn[:, reuse, 3] - drawn[:, k, 3]) / gaps)
            rows.append(
                {
                    "set": name,
                    "n": len(asked),
                    "encoding": key[0],
                    "strategy": key[1],
                    "ratio": key[2],
                    "recovered": round(100 * (1 - mean["kl"] / means[reuse, 0]), 2),
                    "recovered_ci": _interval(recovered),
                    "nll_recovered": nll,
                    "nll_recovered_ci": nll_ci,
                    "f1_ci": _interval(drawn[:, k, 4], 4),
                    **{f: round(v, 6) for f, v in mean.items()},
                }
            )
    return rows


def open_values(path: Path | None, config: dict[str, Any]) -> list[dict[Any, Any]]:
    """What earlier runs of the same `config` kept: that in the first line, then one per question.

    A new file gets its first line here. Ends the program if the file is another run's.
    """
    if path is None:
        return []
    if not path.is_file() or path.stat().st_size == 0:
        path.write_text(json.dumps({"config": config}) + "\n")
        return []
    kept, found = read_values(path)
    for name, value in config.items():
        if kept.get(name) != value:
            raise SystemExit(
                f"{path} was made with {name} {kept.get(name)!r}, this run has {value!r}; give "
                "another --values file"
            )
    return found


def read_values(path: Path) -> tuple[dict[str, Any], list[dict[Any, Any]]]:
    """The settings of a run, and every question's figures."""
    first, *lines = path.read_text().splitlines()
    found = []
    for line in lines:
        value = json.loads(line)
        cells = {(e, s, r): f for e, s, r, f in value.pop("cells")}
        found.append({**cells, **value})
    return json.loads(first).get("config", {}), found


def append_values(path: Path | None, value: dict[Any, Any]) -> None:
    """Keep one question's figures, so that a run that is cut short loses nothing."""
    if path is None:
        return
    cells = [[*key, figures] for key, figures in value.items() if isinstance(key, tuple)]
    rest = {key: v for key, v in value.items() if not isinstance(key, tuple)}
    with path.open("a") as file:
        file.write(json.dumps({**rest, "cells": cells}) + "\n")


def _interval(drawn: np.ndarray, digits: int = 1) -> list[float]:
    return [round(float(q), digits) for q in np.quantile(drawn, [0.025, 0.975])]
