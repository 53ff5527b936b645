"""Tests import benches as benches import each other: `bench/` is the root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
