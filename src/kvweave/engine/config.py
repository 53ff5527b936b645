"""The engine's settings."""

import os
from dataclasses import dataclass, replace

import torch

from kvweave.errors import ConfigError
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool

# What is left open: on a CPU, and on everything else. `for_device` says why.
ON_CPU = {"page_tokens": 32, "step_rows": 256, "alone_rows": 2048, "guess_rows": 128}
ON_DEVICE = {"page_tokens": 64, "step_rows": 2048, "alone_rows": 8192, "guess_rows": 512}
MEMORY_SHARE = 0.25  # of the memory that is there, for the pool
MOST_POOL_TOKENS = 1 << 17  # more than this helps nobody on one device of today's size


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much the engine takes on at once."""

    page_tokens: int | None = None  # of one page; None, here and below: what the device likes
    pool_tokens: int | None = None  # room for KV of all sequences; None: a quarter of the memory
    max_running: int = 32  # sequences that are computed at once
    step_rows: int | None = None  # of a step while somebody decodes: bounds the gap between tokens
    alone_rows: int | None = None  # of a step while nobody does
    guess_rows: int | None = None  # of a speculation in one step
    tree_share: float = 0.5  # of the pool, for exact KV that no request is using
    host_tokens: int | None = None  # exact KV kept in host memory when it leaves the pool; None:
    # four times the pool beside a GPU, nothing on a CPU, where the pool is host memory already
    recorded_rows: int = 64  # on a GPU, steps in which up to so many sequences decode and nothing
    # else happens are played from CUDA graphs; 0: none
    idle_s: float = 5.0  # the thread ends after so long without work, and starts again with it

    def __post_init__(self) -> None:
        for name in ("page_tokens", "max_running", "step_rows", "alone_rows", "guess_rows"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"EngineConfig.{name} must be at least 1")
        if self.recorded_rows < 0:
            raise ConfigError("EngineConfig.recorded_rows must be at least 0")
        if not 0.0 <= self.tree_share <= 1.0:
            raise ConfigError("EngineConfig.tree_share must lie in [0, 1]")
        _check_room(self.pool_tokens, self.page_tokens or 1)


def for_device(cfg: EngineConfig, device: torch.device) -> EngineConfig:
    """What was left open, as the device likes it.

    Pages: a GPU reads those of 64 tokens within 5 % of dense KV and those of 32 up to 8 % slower
    (docs/gpu.md); a CPU has small ones, of which less is copied. Steps: a slice of 256 rows leaves
    most of a GPU idle. Guesses: one that turns out wrong ends between two steps, so its steps
    should be as short as the device computes without waste (128 rows on a CPU, where 64 take half
    as long again).
    """
    likes = ON_CPU if device.type == "cpu" else ON_DEVICE
    return replace(cfg, **{name: n for name, n in likes.items() if getattr(cfg, name) is None})


def make_pool(cfg: EngineConfig, decoder: Decoder) -> KVPool:
    """Room for KV: as configured, or what memory allows. `cfg` as `for_device` gives it."""
    page_tokens = cfg.page_tokens
    assert page_tokens is not None, "a config for a device says how large pages are"
    pages = _num_pages(cfg, page_tokens, decoder)
    return KVPool(decoder.spec, pages, page_tokens, decoder.dtype, decoder.device)


def _num_pages(cfg: EngineConfig, page_tokens: int, decoder: Decoder) -> int:
    if cfg.pool_tokens is not None:
        _check_room(cfg.pool_tokens, page_tokens)
        return cfg.pool_tokens // page_tokens
    spec = decoder.spec
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * decoder.dtype.itemsize
    tokens = int(_memory_bytes(decoder.device) * MEMORY_SHARE) // token_bytes
    return max(1, min(tokens, MOST_POOL_TOKENS) // page_tokens)


def _check_room(pool_tokens: int | None, page_tokens: int) -> None:
    if pool_tokens is not None and pool_tokens < page_tokens:
        raise ConfigError("EngineConfig.pool_tokens must hold at least one page")


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
