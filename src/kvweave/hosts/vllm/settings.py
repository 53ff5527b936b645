"""The connector's settings: kvweave's own configuration, then `kv_connector_extra_config`.

Defaults, `kvweave.toml` and `KVWEAVE_*` variables hold as everywhere (config.py); a key of the
extra config goes before them. Passwords belong into a variable: vLLM logs its arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvweave.app.library.store_tiers import remote_tiers
from kvweave.config import Flag, QualitySettings, StoreSettings, known_keys, load_config
from kvweave.config_keys import Key
from kvweave.errors import ConfigError
from kvweave.fuse.encode.preparation import Preparation
from kvweave.fuse.selectors.strategies import is_known, known_names, split_ratio
from kvweave.hosts.vllm.reuse_request import AUTO
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig, TierConfig
from kvweave.paths import home

SOURCE = "kv_connector_extra_config"
CODEC = "int8"  # as kvweave's own server: its chunk KV is found here
FOLDER = "vllm-kv"  # of the disk tier, below `home()`
MAKING = ("idle", "never")  # when chunks that are not stored are encoded by themselves
LOOK_BYTES = 1 << 20  # host memory of a store that is only looked into


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What the two halves go by."""

    store: StoreSettings
    preparation: Preparation  # what chunks are computed behind
    reuse: str = AUTO  # of requests that do not say it
    ratio: float | None = None  # None: the strategy's own
    bound: float = QualitySettings().bound  # of auto, nats per token
    making: str = "idle"  # of MAKING

    @property
    def codec(self) -> str:
        return CODEC if self.store.codec is None else self.store.codec

    def store_config(self, *, is_look: bool = False) -> StoreConfig:
        """The tiers, fastest first. `is_look`: for one that loads and saves nothing."""
        store = self.store
        host = HostTierConfig()
        if is_look:
            host = replace(host, capacity_bytes=LOOK_BYTES, pinned=False)
        elif store.host_bytes is not None:
            host = replace(host, capacity_bytes=store.host_bytes)
        tiers: tuple[TierConfig, ...] = (host,)
        if store.disk_bytes != 0:
            disk = DiskTierConfig(store.disk_folder or home() / FOLDER)
            if store.disk_bytes is not None:
                disk = replace(disk, capacity_bytes=store.disk_bytes)
            tiers = (*tiers, disk)
        config = StoreConfig(tiers=(*tiers, *remote_tiers(store)))
        return config if store.policy is None else replace(config, policy=store.policy)


def read_settings(extra: Mapping[str, Any]) -> HostSettings:
    """From what `--kv-transfer-config` says. Raises ConfigError, which names the key."""
    known = _keys()
    flags, making = {}, "idle"
    for name, raw in extra.items():
        if name == "making":
            making = raw
        elif name in known:
            value = known[name].kind.from_toml(raw, Path.cwd())
            flags[str(known[name])] = Flag(f"{SOURCE}.{name}", value)
        else:
            raise ConfigError(f"{SOURCE} has no {name!r}; known: {', '.join([*known, 'making'])}")
    if making not in MAKING:
        raise ConfigError(f"{SOURCE}.making must be one of {', '.join(MAKING)}; got {making!r}")
    config = load_config(flags=flags).config
    preparation = Preparation.parse(config.library.encoding or "filler")
    if preparation.variant.kind == "neighbours":
        raise ConfigError(
            "inside vLLM there is no knowledge base to find neighbours in; use filler"
        )
    reuse, ratio = _reuse(config.quality.reuse)
    return HostSettings(config.store, preparation, reuse, ratio, config.quality.bound, making)


def _keys() -> dict[str, Key]:
    """The settings that the extra config may hold, by their short names."""
    found = {key.name: key for key in known_keys().values() if key.section == "store"}
    for name in ("library.encoding", "quality.reuse", "quality.bound"):
        found[known_keys()[name].name] = known_keys()[name]
    return found


def _reuse(text: str | None) -> tuple[str, float | None]:
    """A strategy with a ratio if one stands behind it."""
    if text is None or text == AUTO:
        return AUTO, None
    name, share = split_ratio(text)
    if not is_known(name):
        raise ConfigError(f"reuse {name!r} is unknown; known: {', '.join([AUTO, *known_names()])}")
    try:
        ratio = None if share is None else float(share)
    except ValueError:
        ratio = -1.0
    if ratio is not None and not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"reuse {text!r}: write a strategy and a share of rows, as weave:0.15")
    return name, ratio
