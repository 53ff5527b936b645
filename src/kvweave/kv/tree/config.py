"""Budgets and rules of a knowledge tree."""

from dataclasses import dataclass

from kvweave.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """Budgets and rules of one tree."""

    device_bytes: int
    host_bytes: int  # one to two orders of magnitude more than on the device pays best; 0: none
    policy: str = "pgdsf"  # lru, lfu, gdsf or pgdsf; each tier has its own clock
    max_depth: int | None = None  # keep only the first so many chunks of a path; None: all
    remembered_paths: int = 1 << 16  # absent paths whose usage is remembered; 0: none

    def __post_init__(self) -> None:
        if self.device_bytes <= 0 or self.host_bytes < 0:
            raise ConfigError(
                f"a tree needs device_bytes > 0 and host_bytes >= 0, "
                f"got {self.device_bytes} and {self.host_bytes}"
            )
        if self.max_depth is not None and self.max_depth < 0:
            raise ConfigError(f"TreeConfig.max_depth must be None or >= 0, got {self.max_depth}")
        if self.remembered_paths < 0:
            raise ConfigError(
                f"TreeConfig.remembered_paths must be >= 0, got {self.remembered_paths}"
            )
