"""Writes a safetensors file tensor by tensor, so that a model never stands in memory whole.

The format is a length, a JSON header with every tensor's dtype, shape and byte range, then the
bytes. Shapes are known before the weights are, so the header can go out first.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvweave.model.files.gguf.packings import F32

_HEADER_ALIGNMENT = 8


class SafetensorsWriter:
    """Writes float32 tensors in the order of `shapes`. Same shapes and data give the same bytes.

    Use as a context manager. Leaving it checks that every tensor arrived in full and flushes to
    the disk; leaving it through an exception leaves a useless file for the caller to remove.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + 4 * int(np.prod(shape))
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        self.total_bytes = 8 + len(text) + end
        self._shapes = dict(shapes)
        self._waiting = list(shapes)[::-1]
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self.done_bytes = 8 + len(text)

    def write(self, name: str, slabs: Iterable[F32]) -> None:
        """Write one tensor, handed over in slabs of rows; only one slab is alive at a time."""
        assert self._waiting, f"{name} was never announced"
        expected = self._waiting.pop()
        assert name == expected, f"tensors must come in the announced order: {expected}, not {name}"
        num_values = 0
        for slab in slabs:
            num_values += slab.size
            self._file.write(np.ascontiguousarray(slab, "<f4").data)
            self.done_bytes += 4 * slab.size
        assert num_values == int(np.prod(self._shapes[name])), f"{name}: {num_values} values"

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        with self._file:
            if error is None:
                assert not self._waiting, f"never written: {self._waiting[::-1]}"
                self._file.flush()
                os.fsync(self._file.fileno())
