"""Eviction and admission policies, by name. The knowledge tree and the tiers use the same ones."""

from collections.abc import Callable

from kvweave.errors import ConfigError
from kvweave.kv.policies.base import HALF_LIFE_S, ItemUsage, Policy, UsageRecord
from kvweave.kv.policies.gdsf import GDSF
from kvweave.kv.policies.lfu import LFU
from kvweave.kv.policies.lru import LRU
from kvweave.kv.policies.pgdsf import PGDSF
from kvweave.kv.policies.ranking import RankHeap

__all__ = [
    "GDSF",
    "HALF_LIFE_S",
    "LFU",
    "LRU",
    "PGDSF",
    "POLICIES",
    "ItemUsage",
    "Policy",
    "RankHeap",
    "UsageRecord",
    "open_policy",
]

POLICIES: dict[str, Callable[[], Policy]] = {"lru": LRU, "lfu": LFU, "gdsf": GDSF, "pgdsf": PGDSF}


def open_policy(name: str) -> Policy:
    """A fresh policy: each tier has its own, with its own clock."""
    if name not in POLICIES:
        raise ConfigError(f"no policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
