"""The tiers that settings name: made out of them, and judged before anything waits for them."""

import os
import re
from dataclasses import replace

from kvweave.config import StoreSettings
from kvweave.errors import ConfigError, TierError
from kvweave.kv.format.codec import open_codec
from kvweave.kv.policies import open_policy
from kvweave.kv.tiers import open_tier
from kvweave.kv.tiers.config import RedisTierConfig, S3TierConfig

SCHEMES = ("redis://", "rediss://", "unix://")
_BUCKET = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?")


def remote_tiers(store: StoreSettings) -> tuple[RedisTierConfig | S3TierConfig, ...]:
    """The tiers that machines share, fastest first. Raises ConfigError for a url that cannot be
    meant."""
    found: list[RedisTierConfig | S3TierConfig] = []
    if store.redis_url is not None:
        redis = RedisTierConfig(store.redis_url, ttl_s=store.redis_ttl_s)
        if not store.redis_url.startswith(SCHEMES):
            known = ", ".join(SCHEMES)
            raise ConfigError(f"store.redis_url {redis.shown!r} must begin with one of {known}")
        found.append(redis)
    elif store.redis_ttl_s is not None:
        raise ConfigError("store.redis_ttl_s is for a tier that is not set; set store.redis_url")
    if store.s3_url is not None:
        match = _BUCKET.fullmatch(store.s3_url)
        if match is None:
            raise ConfigError(
                f"store.s3_url {store.s3_url!r} names no bucket; write s3://BUCKET/PREFIX"
            )
        s3 = S3TierConfig(match[1], endpoint_url=store.s3_endpoint, region=store.s3_region)
        below = (match[2] or "").strip("/")
        found.append(replace(s3, prefix=f"{below}/") if below else s3)
    elif store.s3_endpoint is not None or store.s3_region is not None:
        name = "s3_region" if store.s3_endpoint is None else "s3_endpoint"
        raise ConfigError(f"store.{name} is for a tier that is not set; set store.s3_url")
    return tuple(found)


def check_store(store: StoreSettings) -> None:
    """Raise ConfigError, which names the setting and the way out, for what cannot be: a codec or a
    policy that there is none of, a folder that cannot be written, a server that does not answer.
    For the start; a tier that fails later is a miss. Blocks on IO."""
    for name, opened in (("codec", open_codec), ("policy", open_policy)):
        value = getattr(store, name)
        try:
            if value is not None:
                opened(value)
        except ConfigError as error:
            raise ConfigError(f"store.{name}: {error}") from error
    if store.disk_folder is not None and store.disk_bytes != 0:
        try:
            store.disk_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"store.disk_folder {store.disk_folder} cannot be made: {error.strerror}"
            ) from error
        if not os.access(store.disk_folder, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(
                f"store.disk_folder {store.disk_folder} cannot be written; give another folder"
            )
    for cfg in remote_tiers(store):
        name = "store.redis_url" if isinstance(cfg, RedisTierConfig) else "store.s3_url"
        try:
            tier = open_tier(cfg)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        try:
            tier.check()
        except TierError as error:
            raise ConfigError(f"{name} {cfg.place.split()[0]}: {error}; or leave it out") from error
        finally:
            tier.close()
