"""One upstream, and what is known of it."""

from enum import StrEnum
from urllib.parse import urlsplit

from kvweave.config import GatewaySettings
from kvweave.errors import ConfigError
from kvweave.gateway.cards import UpstreamCard
from kvweave.gateway.connections import Connections, Exchange, base_url
from kvweave.gateway.mirror import LoadedChunks, Mirror
from kvweave.kv.tier_slot import Breaker


class ReplicaHealth(StrEnum):
    """By the last look."""

    UNKNOWN = "unknown"  # not seen yet
    UP = "up"
    DRAINING = "draining"  # it answers, and takes no new work: what it computes may finish
    DOWN = "down"  # it does not answer


class Replica:
    """State of one upstream. The fleet's lock guards what changes, but connections and breaker,
    which are safe by themselves, as is what it loaded."""

    def __init__(self, url: str, cfg: GatewaySettings, api_key: str | None = None) -> None:
        is_only = len(cfg.upstreams or ()) <= 1
        self.connections = Connections(
            url, connect_s=cfg.connect_s, api_key=api_key, is_only=is_only
        )
        self.name = self.connections.url
        self.breaker = Breaker(
            f"requests to {self.name}",
            cfg.breaker_failures,
            cfg.breaker_rest_s,
            others="others get them",
        )
        self.mirror = Mirror(cfg.mirror_tokens)
        self.loaded = LoadedChunks()
        self.card: UpstreamCard | None = None  # None: not seen yet, or not since it died
        self.models: dict[str, int | None] = {}  # as its last card had them, also while it is down
        self.health = ReplicaHealth.UNKNOWN
        self.why: str | None = None  # it is not up, in its own words or in those of the connection
        self.silent_looks = 0  # in a row
        self.load = 0  # requests that it has now
        self.prefills = 0  # of these, without a first token yet
        self.backlog = 0  # tokens of those that are to be computed
        self.exchanges: set[Exchange] = set()  # to be cut where it dies

    @property
    def is_open(self) -> bool:
        """Takes requests, as far as is known. A breaker whose rest is over lets one through."""
        return (
            self.card is not None and self.health is ReplicaHealth.UP and not self.breaker.is_open
        )

    def has(self, model: str) -> bool:
        """Whether it serves a model, or did when it was last seen. "": whichever it has."""
        return not model or model in self.models

    @property
    def words(self) -> str:
        """How it is, for people."""
        if self.health is ReplicaHealth.UP and self.breaker.is_open:
            return f"{self.name} is resting after failures"
        why = "" if self.why is None else f" ({self.why.removeprefix(self.name).lstrip(': ')})"
        return f"{self.name} is {self.health}{why}"


def read_upstreams(settings: GatewaySettings) -> tuple[str, ...]:
    """The addresses of the upstreams, each once. Raises ConfigError."""
    upstreams = settings.upstreams or ()
    if not upstreams:
        raise ConfigError("no upstream is named; give --upstream URL, once for each engine")
    for url in upstreams:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"upstream {url!r} is no address; write http://HOST:PORT")
    if len({base_url(url) for url in upstreams}) < len(upstreams):
        raise ConfigError("an upstream is named twice; leave one out")
    return upstreams


def read_key(settings: GatewaySettings) -> str | None:
    """The key that upstreams want; None: none is sent. Raises ConfigError."""
    file = settings.key_file
    if file is None:
        return None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the upstreams' key in {file}: {error}") from error
    if not key or "\n" in key:
        raise ConfigError(f"{file} must hold one line, the key that upstreams want")
    return key
