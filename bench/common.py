"""What every bench shares: the data folders, the facts of the run, the last line."""

import gzip
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "bench" / "cache"
sys.path.insert(0, str(ROOT / "src"))  # a bench measures the tree it stands in


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def commit() -> str:
    """Short hash of the measured tree, with a plus when it differs from that commit."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "src", "bench/*.py"], capture_output=True, text=True
    )
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


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
