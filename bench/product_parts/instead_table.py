"""The table of `bench/product.py --instead`: printed behind a run, and kept in README."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
WORDS = {  # a system, and the weights that it computes with
    "kvweave": ("kvweave, as it comes", "8 bits"),
    "full": ("kvweave, nothing reused", "8 bits"),
    "vllm": ("vLLM, prefix cache", "float32"),
    "contextpilot": ("ContextPilot before vLLM", "float32"),
    "llamacpp": ("llama.cpp, prompt cache", "4 bits"),
    "transformers": ("transformers", "float32"),
}
COLUMNS = (
    "system",
    "weights",
    "first token, p50",
    "… p95",
    "whole answer, p50",
    "requests a second",
    "peak memory",
    "right answers",
)


def cells_of(row: Row) -> list[str]:
    per_s = row["requests_per_s"]
    return [
        *WORDS[row["system"]],
        f"{row['ttft_p50_ms'] / 1e3:.2f} s",
        f"{row['ttft_p95_ms'] / 1e3:.2f} s",
        f"{row['total_p50_ms'] / 1e3:.2f} s",
        "–" if per_s is None else f"{per_s:.2f}",
        f"{row['peak_mb'] / 1e3:.1f} GB",
        f"{row['right']} of {row['asked']}",
    ]


def newest_instead(runs: Sequence[Row]) -> dict[str, Any]:
    """What stands in front of the runs of a result file: the newest comparison, without answers."""
    for run in reversed(runs):
        if "instead" in run:
            rows = [{k: v for k, v in row.items() if k != "answers"} for row in run["instead"]]
            named = {name: run[name] for name in ("date", "commit", "device", "config")}
            return {"instead": {**named, "rows": rows}}
    return {}
