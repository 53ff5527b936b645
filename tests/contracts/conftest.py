"""One of each tier, for the contract suite. Servers start once per session."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvweave.kv.tiers import Tier, open_tier
from kvweave.kv.tiers.config import (
    DiskTierConfig,
    HostTierConfig,
    RedisTierConfig,
    S3TierConfig,
    TierConfig,
)
from worlds.faulty import FaultPlan, FaultyTierConfig

MIB = 1 << 20
TIERS = ["host", "disk", "disk direct", "redis", "s3", "faulty host", "faulty disk"]


@pytest.fixture(params=TIERS)
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Tier]]:
    """Opens the tier under test; called twice it opens the same place again."""
    cfg = _config(request.param, request, tmp_path)
    opened: list[Tier] = []

    def make() -> Tier:
        opened.append(open_tier(cfg))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


@pytest.fixture
def tier(make_tier: Callable[[], Tier]) -> Tier:
    return make_tier()


def _config(name: str, request: pytest.FixtureRequest, folder: Path) -> TierConfig:
    host = HostTierConfig(capacity_bytes=8 * MIB, pinned=False)
    match name:
        case "host":
            return host
        case "disk":
            return DiskTierConfig(folder)
        case "disk direct":
            return DiskTierConfig(folder, direct_io=True)
        case "redis":
            url = request.getfixturevalue("redis_url")
            return RedisTierConfig(url, prefix=f"[{uuid.uuid4().hex}]*:")
        case "s3":
            endpoint = request.getfixturevalue("s3_endpoint")
            return S3TierConfig(
                "chunks", f"{uuid.uuid4().hex}/", endpoint_url=endpoint, region="us-east-1"
            )
        case "faulty host":
            return FaultyTierConfig(host)
        case "faulty disk":
            late = FaultPlan(delay=0.5, delay_s=0.002)
            return FaultyTierConfig(DiskTierConfig(folder), late)
    raise AssertionError(name)
