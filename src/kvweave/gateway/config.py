"""What a gateway must know before it begins: that its upstreams are addresses, and their key."""

from urllib.parse import urlsplit

from kvweave.config import GatewaySettings
from kvweave.errors import ConfigError


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


def base_url(url: str) -> str:
    """Without the /v1 that clients are configured with."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


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
