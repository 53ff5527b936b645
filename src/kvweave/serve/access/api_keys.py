"""API keys: who may ask, and which tenant they are.

    sk-one                a key without a tenant
    sk-two:acme           a key of the tenant acme

Tenants have knowledge bases of their own and share no chunk KV; keys of one tenant share both.
"""

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from kvweave.app.libraries.libraries import check_tenant
from kvweave.errors import ConfigError
from kvweave.serve.access.errors import ApiError, error_response

VARIABLE = "KVWEAVE_API_KEYS"
SHORTEST_KEY = 8
GUARDED = "/v1"  # health, metrics and the schema need no key

Keys = Mapping[bytes, str]  # digest of a key → its tenant


def read_keys(file: Path | None, environ: Mapping[str, str] = os.environ) -> Keys:
    """Keys of the file and of the environment; with none at all every client may ask."""
    lines: list[str] = []
    if file is not None:
        try:
            lines += file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys in {file}: {error}") from error
    lines += environ.get(VARIABLE, "").replace(",", "\n").splitlines()
    keys = parse_keys(lines)
    if file is not None and not keys:
        raise ConfigError(f"{file} has no API key; write one per line: key or key:tenant")
    return keys


def parse_keys(lines: Iterable[str]) -> Keys:
    keys: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, _, tenant = line.partition(":")
        if len(key) < SHORTEST_KEY:
            raise ConfigError(
                f"API key {number} is shorter than {SHORTEST_KEY} characters; make it longer"
            )
        if digest(key) in keys:
            raise ConfigError(f"API key {number} is there twice; remove one")
        keys[digest(key)] = check_tenant(tenant.strip())
    return keys


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def tenant_of(scope: Scope) -> str:
    """Whose request it is, as `ApiKeys` noted it; "" where there are no keys."""
    return str(scope.get("state", {}).get("tenant", ""))


def is_stranger(scope: Scope) -> bool:
    """Whether a request to what needs no key came without one that belongs to no tenant: it may
    know how the server is, and not who its tenants are."""
    return bool(scope.get("state", {}).get("is_stranger", False))


def client_of(scope: Scope) -> str:
    """Who is to share with others: the tenant, or the address where there are none."""
    client = scope.get("client")
    return tenant_of(scope) or (str(client[0]) if client else "")


class ApiKeys:
    """ASGI middleware: lets holders of a key through and notes their tenant."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys:
            await self._app(scope, receive, send)
            return
        tenant = self._tenant(dict(scope["headers"]).get(b"authorization", b""))
        if not _is_guarded(scope["path"]):
            scope.setdefault("state", {})["is_stranger"] = tenant != ""
            await self._app(scope, receive, send)
            return
        if tenant is None:
            await error_response(_unknown())(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)

    def _tenant(self, header: bytes) -> str | None:
        scheme, _, key = header.decode("latin-1").partition(" ")
        given, found = digest(key.strip()), None
        for known, tenant in self._keys.items():  # all of them: how long it takes tells nothing
            if hmac.compare_digest(known, given):
                found = tenant
        return found if scheme.lower() == "bearer" else None


def _is_guarded(path: str) -> bool:
    return path == GUARDED or path.startswith(f"{GUARDED}/")


def _unknown() -> ApiError:
    return ApiError(
        401,
        "the API key is missing or wrong; send it as Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
