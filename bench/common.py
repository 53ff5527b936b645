"""What every bench shares: where it ran, how it reports, how two things are timed side by side."""

import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
CACHE = REPO / "bench" / "cache"
sys.path.insert(0, str(REPO / "src"))  # a bench measures the tree it stands in


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def commit() -> str:
    """Short id of the commit that ran, with a + if the tree had changes.

    A machine that got a bare copy of the tree is told by BENCH_COMMIT.
    """
    if told := os.environ.get("BENCH_COMMIT"):
        return told
    run = ["git", "-C", str(REPO)]
    head = subprocess.run(
        [*run, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    dirty = subprocess.run(
        [*run, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return (head or "unknown") + ("+" if dirty else "")


def device_words(device: str = "cpu") -> str:
    """The machine in words, without its name."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    flags = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} CPU ({flags}), {torch.get_num_threads()} threads"


def result_header(bench: str, device: str) -> dict[str, Any]:
    """What every result says of where it came from."""
    import torch

    return {
        "bench": bench,
        "commit": commit(),
        "device": device_words(device),
        "torch": torch.__version__,
    }


def report(bench: str, device: str, config: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Print the last line: one JSON object."""
    print(json.dumps({**result_header(bench, device), "config": dict(config), **results}))


def alternate(
    runs: Mapping[str, Callable[[], object]], repeats: int, warmups: int = 1
) -> dict[str, list[float]]:
    """Seconds of each run, taken in turns so that a slow spell of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(-warmups, repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if i >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def cpu_device() -> str:
    return f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} CPU"


def versions(*names: str) -> dict[str, str]:
    return {name: version(name) for name in names}


def peak_rss_mb() -> float:
    """Highest resident memory of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return float("nan")


def rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return float("nan")


def finish(result: dict[str, Any], out: Path | None = None) -> None:
    """The last line of every bench: one JSON object. `out` keeps a readable copy."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
