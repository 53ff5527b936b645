"""A tier as the store sees it: the tier itself, its threads, its breakers and its shelf."""

import logging
from dataclasses import dataclass

from kvweave.errors import TierError
from kvweave.kv.breaker import Breaker
from kvweave.kv.config import FaultyTierConfig, StoreConfig, TierConfig
from kvweave.kv.io_pool import IoPool
from kvweave.kv.policies import open_policy
from kvweave.kv.tier_budget import TierBudget
from kvweave.kv.tiers import Tier, open_tier
from kvweave.metrics import Metrics

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class TierSlot:
    """One tier in use. Mutable parts guard themselves, but for the shelf: the store's lock does."""

    tier: Tier
    pool: IoPool
    reads: Breaker
    writes: Breaker
    shelf: TierBudget | None  # None: a remote tier, which budgets and evicts by itself
    deadline_s: float  # a read that gives nothing for this long is a miss
    budget_s: float  # what one request waits for this tier in all

    @property
    def name(self) -> str:
        return self.tier.name


def open_places(cfg: StoreConfig, metrics: Metrics) -> list[TierSlot]:
    """Open every tier that can be used. One that cannot is counted, named in the log with what to
    do about it, and left out: the store serves without it."""
    places: list[TierSlot] = []
    for tier_cfg in cfg.tiers:
        try:
            tier = open_tier(tier_cfg)
        except TierError as error:
            log.warning("a tier is left out: %s", error)
            metrics.count("kv_tier_errors_total", tier=_kind(tier_cfg), verb="open")
            continue
        places.append(make_place(tier, _capacity(tier_cfg), cfg))
    return places


def make_place(tier: Tier, capacity_bytes: int | None, cfg: StoreConfig) -> TierSlot:
    def breaker(direction: str) -> Breaker:
        what = f"{tier.name} {direction}"
        return Breaker(what, cfg.breaker_failures, cfg.breaker_rest_s)

    return TierSlot(
        tier=tier,
        pool=IoPool(tier.name, cfg.io_threads),
        reads=breaker("reads"),
        writes=breaker("writes"),
        shelf=None
        if capacity_bytes is None
        else TierBudget(capacity_bytes, open_policy(cfg.policy)),
        deadline_s=cfg.remote_deadline_s if tier.remote else cfg.local_deadline_s,
        budget_s=cfg.remote_budget_s if tier.remote else cfg.local_budget_s,
    )


def _capacity(cfg: TierConfig) -> int | None:
    inner = cfg.inner if isinstance(cfg, FaultyTierConfig) else cfg
    capacity: int | None = getattr(inner, "capacity_bytes", None)
    return capacity


def _kind(cfg: TierConfig) -> str:
    return type(cfg).__name__.removesuffix("TierConfig").lower()
