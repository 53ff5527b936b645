"""What the models of one process leave to the next: exact KV, as one file.

line of JSON: name of a model      each
what its engine writes             see `engine/left_prefixes.py`
"""

import json
import logging
import sys
from collections.abc import Sequence
from typing import BinaryIO

from kvweave.app.hosts import LocalModel
from kvweave.engine.left_prefixes import room_bytes

log = logging.getLogger(__name__)


def leave_models(models: Sequence[LocalModel], file: BinaryIO) -> None:
    """Write what the next process can go on with, of models whose engine was lost. There is room
    for so much of all of them; the usual one comes first."""
    most_bytes = room_bytes()
    for model in models:
        file.write(json.dumps(model.model_name).encode() + b"\n")
        began = file.tell()
        num_chunks = model.runtime.client.leave(file, most_bytes)
        most_bytes -= file.tell() - began
        log.warning("exact KV of %d chunks is left to the next process", num_chunks)


def take_models(models: Sequence[LocalModel], file: BinaryIO) -> None:
    """Take what another process left. Raises ValueError, KeyError or OSError where that is not
    whole, or of other models."""
    by_name = {model.model_name: model for model in models}
    while name := file.readline():
        num_chunks = by_name[json.loads(name)].runtime.client.take(file)
        print(f"kvweave: exact KV of {num_chunks} chunks is back", file=sys.stderr)
