"""Typed access to the metadata of one architecture: `llama.block_count` is `block_count`."""

from typing import TypeVar

import numpy as np

from kvweave.errors import ModelCorrupt, UnsupportedModel
from kvweave.model.files.gguf import GGUFFile

T = TypeVar("T")


class Settings:
    """What a GGUF file says about its decoder. Wrong types and lengths are a ModelCorrupt."""

    def __init__(self, gguf: GGUFFile, supported: tuple[str, ...]) -> None:
        self.path = gguf.path
        self._metadata = gguf.metadata
        arch = gguf.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise ModelCorrupt(f"{self.path} names no general.architecture; download it again")
        if arch not in supported:
            raise UnsupportedModel(
                f"{self.path} has architecture {arch!r}; supported: {', '.join(supported)}"
            )
        self.arch = arch

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value, or None when the file does not say."""
        value = self._metadata.get(f"{self.arch}.{key}")
        if isinstance(value, list):
            if any(v != value[0] for v in value):
                raise UnsupportedModel(
                    f"{self.path}: {self.arch}.{key} differs from layer to layer"
                )
            value = value[0] if value else None  # one number per layer, all alike
        if value is None:
            return None
        if kind is float and type(value) in (int, float):
            # GGUF keeps float32: 1e-05 must not come back as 9.999999747378752e-06
            value = float(str(np.float32(value)))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelCorrupt(
                f"{self.path}: {self.arch}.{key} is {value!r}, not {kind.__name__}; "
                "download it again"
            )
        return value

    def get_or(self, key: str, default: T) -> T:
        value = self.get(key, type(default))
        return default if value is None else value

    def need(self, key: str, kind: type[T]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise ModelCorrupt(f"{self.path} has no metadata {self.arch}.{key}; download it again")
        return value

    def count(self, key: str) -> int:
        """A number of things: at least one."""
        value = self.need(key, int)
        if value < 1:
            raise ModelCorrupt(f"{self.path}: {self.arch}.{key} is {value}; download it again")
        return value
