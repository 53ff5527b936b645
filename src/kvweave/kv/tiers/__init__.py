"""Places for chunk objects: host memory, disk, Valkey/Redis, S3."""

from kvweave.kv.format.header import Reader
from kvweave.kv.tiers.base import StoredObject, Tier
from kvweave.kv.tiers.config import (
    DiskTierConfig,
    HostTierConfig,
    RedisTierConfig,
    S3TierConfig,
    TierConfig,
)

__all__ = ["Reader", "StoredObject", "Tier", "open_tier"]


def open_tier(cfg: TierConfig) -> Tier:
    """The tier a config asks for. Imports only what that tier needs.

    Raises TierError if there is not the memory, ConfigError if the setting cannot be meant. A
    folder that cannot be read and a server that is down may be back later: they are found out by
    the first call, or by `check`.
    """
    match cfg:
        case HostTierConfig():
            from kvweave.kv.tiers.host import HostTier

            return HostTier(cfg)
        case DiskTierConfig():
            from kvweave.kv.tiers.disk import DiskTier

            return DiskTier(cfg)
        case RedisTierConfig():
            from kvweave.kv.tiers.redis import RedisTier

            return RedisTier(cfg)
        case S3TierConfig():
            from kvweave.kv.tiers.s3 import S3Tier

            return S3Tier(cfg)
        case _:
            return cfg.open()
