"""Which web pages may use the server: its own, and those it was told of.

A browser sends requests for any page that is open in it, to this machine too. Where no API key
stands in the way, two checks do:

- Host. A page of evil.example can have that name point to this machine and is then, to the browser,
  of the same origin as this server. So a server without keys answers only to names that cannot be
  somebody else's: addresses, localhost, names without a dot, the name it listens on, and those of
  `server.allowed_hosts`.
- Origin. A page of another origin can send simple requests without asking, uploads among them. It
  cannot hide where it is from: those are refused, unless `server.allowed_origins` has it.

Pages of other origins may read replies (CORS) only where `server.allowed_origins` names them.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.errors import ConfigError
from kvweave.serve.access.api_keys import Keys
from kvweave.serve.access.errors import ApiError, error_response

ANY = "*"
SAFE = frozenset(("GET", "HEAD", "OPTIONS"))  # change nothing
LONGEST_SHOWN = 100


@dataclass(frozen=True, slots=True)
class OriginRules:
    """Names and pages that a server knows of. Raises ConfigError for what is neither."""

    hosts: tuple[str, ...] = ()  # names; a star stands for anything: *.example.org
    origins: tuple[str, ...] = ()  # https://app.example.org; "*": all of them

    def __post_init__(self) -> None:
        for origin in self.origins:
            parts = urlsplit(origin)
            is_plain = parts.scheme and parts.netloc and not parts.path.strip("/")
            if origin != ANY and not is_plain:
                raise ConfigError(
                    f"server.allowed_origins: {origin!r} is no origin; write one as "
                    "https://app.example.org"
                )
        for host in self.hosts:
            if "/" in host:
                raise ConfigError(
                    f"server.allowed_hosts: {host!r} is no name; write one as kb.example.org"
                )

    def knows_host(self, host: str) -> bool:
        """Whether a Host header names this server and nobody else's."""
        name = _name_of(host)
        if not name or "." not in name or name.endswith(".localhost") or _is_address(name):
            return True
        return any(fnmatchcase(name, known.lower()) for known in self.hosts)

    def knows_origin(self, origin: str) -> bool:
        return ANY in self.origins or origin.lower() in (
            o.lower().rstrip("/") for o in self.origins
        )


class OriginCheck:
    """ASGI middleware: a 403 for requests of pages that have no business here."""

    def __init__(self, app: ASGIApp, rules: OriginRules, *, has_keys: bool) -> None:
        """With API keys a page needs one of them: then only what `rules` name is checked."""
        self._app = app
        self._rules = rules
        self._has_keys = has_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._refusal(scope["method"], headers)
        if refused is not None:
            await error_response(refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, method: str, headers: Mapping[bytes, str]) -> ApiError | None:
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        checks_host = not self._has_keys or bool(self._rules.hosts)
        if checks_host and not self._rules.knows_host(host):
            return ApiError(
                403,
                f"this server does not go by the name {host[:LONGEST_SHOWN]!r}; use its address, "
                "or have its administrator name it in server.allowed_hosts",
                code="host_not_allowed",
            )
        if self._has_keys:
            return None
        if origin is None:
            # older than Origin on every request, and of no page that has another one
            is_foreign = headers.get(b"sec-fetch-site") == "cross-site" and method not in SAFE
        else:
            is_foreign = not (_is_same(origin, host) or self._rules.knows_origin(origin))
        if not is_foreign:
            return None
        return ApiError(
            403,
            f"pages of {(origin or 'another site')[:LONGEST_SHOWN]!r} may not use this server; its "
            "administrator can name them in server.allowed_origins",
            code="origin_not_allowed",
        )


def _is_same(origin: str, host: str) -> bool:
    """Whether a page came from this server. The scheme may differ: a proxy may have ended TLS."""
    return bool(host) and urlsplit(origin).netloc.lower() == host.lower()


def _name_of(host: str) -> str:
    """Without the port, without brackets, in small letters."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Without keys every client may ask, but pages of others (`origins.py`)."""

    keys: Keys = field(default_factory=dict)
    origins: OriginRules = field(default_factory=OriginRules)

    @property
    def has_keys(self) -> bool:
        return bool(self.keys)
