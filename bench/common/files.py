"""Where a bench finds and keeps things."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
CACHE = REPO / "bench" / "cache"  # what is dear to make again; git ignores it
RESULTS = REPO / "bench" / "results"


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)
