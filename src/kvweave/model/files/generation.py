"""How a model's makers want it drawn: what generation_config.json in its folder says of it.

Only what the file names counts; other libraries' defaults for what it leaves out do not.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvweave.errors import ModelCorrupt

FILE = "generation_config.json"
KEYS = ("temperature", "top_p", "top_k", "repetition_penalty")


def read_generation(folder: Path) -> dict[str, Any]:
    """Read those of KEYS that the file has; a null counts as left out. `do_sample: false` is
    temperature 0. Empty without a file. Raises ModelCorrupt."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        told = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelCorrupt(f"{path} does not parse: {error}") from error
    if not isinstance(told, dict):
        raise ModelCorrupt(f"{path} is no JSON object")
    found = {key: told[key] for key in KEYS if told.get(key) is not None}
    if told.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def unless_greedy(generation: Mapping[str, Any], temperature: float | None) -> Mapping[str, Any]:
    """What of it counts for who chose a temperature (None: nobody did). Who asks for 0 asks for the
    likeliest token: nothing that is meant for drawn answers changes that."""
    return {} if temperature == 0.0 else generation
