"""What one gateway is told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from kvweave.config import GatewaySettings
from kvweave.errors import ConfigError

Routing = Literal["cache", "least_loaded", "round_robin"]


@dataclass(frozen=True, slots=True)
class RetryRules:
    """How often a request that failed goes to another upstream."""

    most: int = 2  # of one request
    share: float = 0.2  # of all requests, over time
    reserve: int = 64  # at once, where more fail together; comes back within ten seconds


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Upstreams, and how requests are spread over them."""

    upstreams: tuple[str, ...]  # http://HOST:PORT, each once
    api_key: str | None = None  # sent to them
    connector: Literal["auto", "on", "off"] = "auto"  # do vLLM upstreams fuse? auto asks them
    routing: Routing = "cache"
    load_factor: float = 1.25  # no replica gets more than so many times the mean load
    mirror_tokens: int = 1_000_000  # that a replica is believed to hold
    retry: RetryRules = RetryRules()
    connect_s: float = 2.0
    silence_s: float = 300.0  # in which no event of a reply comes; beyond that it has failed
    health_s: float = 2.0  # between two looks at a replica, and for the look itself
    wait_s: float = 10.0  # for an upstream, where none takes requests
    breaker_failures: int = 5  # in a row; a replica that fails so often rests
    breaker_rest_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.upstreams:
            raise ConfigError("no upstream is named; give --upstream URL, once for each engine")
        for url in self.upstreams:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"upstream {url!r} is no address; write http://HOST:PORT")
        names = [base_url(url) for url in self.upstreams]
        if len(set(names)) < len(names):
            raise ConfigError("an upstream is named twice; leave one out")

    @classmethod
    def of(cls, settings: GatewaySettings) -> "GatewayConfig":
        """What a configuration says. Reads the key file."""
        retry = RetryRules(settings.retries, settings.retry_share, settings.retry_reserve)
        return cls(
            upstreams=settings.upstreams or (),
            api_key=None if settings.key_file is None else _read_key(settings.key_file),
            connector=settings.connector,
            routing=settings.routing,
            load_factor=settings.load_factor,
            mirror_tokens=settings.mirror_tokens,
            retry=retry,
            connect_s=settings.connect_s,
            silence_s=settings.silence_s,
            health_s=settings.health_s,
            wait_s=settings.wait_s,
            breaker_failures=settings.breaker_failures,
            breaker_rest_s=settings.breaker_rest_s,
        )


def base_url(url: str) -> str:
    """Without the /v1 that clients are configured with."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _read_key(file: Path) -> str:
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the upstreams' key in {file}: {error}") from error
    if not key or "\n" in key:
        raise ConfigError(f"{file} must hold one line, the key that upstreams want")
    return key
