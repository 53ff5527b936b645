"""GET / and /ui/…: the web page. No key is needed for it; what it shows comes from /v1 with one.
GET /docs/…: the documentation, where it was built.

Files are in memory, each with its type, a name for its content and a compressed copy. Only what
lies in the folder when the server starts can be named, so no path leads out of it.
"""

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from kvweave.serve.access.errors import ApiError

FOLDER = Path(__file__).parent / "static"
SITE = Path(__file__).parent / "site"  # `make site` puts it there, and a wheel takes it along
PAGE = "index.html"
# Written down here: what a machine's own tables say of .js differs.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".webp": "image/webp",
    ".woff2": "font/woff2",
}
PACKED = {".png", ".ico", ".webp", ".woff2"}  # compressed already
LEAST_BYTES = 512  # of a smaller file a compressed copy saves nothing
LEVEL = 9  # once per start


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    media_type: str
    body: bytes
    packed: bytes | None  # the same, by gzip; None: that would not be shorter
    etag: str  # names the content, quotes included


def read_assets(folder: Path = FOLDER) -> dict[str, Asset]:
    """Every file below `folder` whose type is known, by its path from there with slashes. Files of
    other types are not served."""
    return {name: _read(path) for name, path in _find_files(folder).items()}


def _find_files(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in TYPES
    }


def _read(path: Path) -> Asset:
    body = path.read_bytes()
    packed = None
    if path.suffix not in PACKED and len(body) >= LEAST_BYTES:
        shorter = gzip.compress(body, LEVEL, mtime=0)  # the same bytes at every start
        packed = shorter if len(shorter) < len(body) else None
    digest = hashlib.blake2b(body, digest_size=12).hexdigest()
    return Asset(TYPES[path.suffix], body, packed, f'"{digest}"')


# Nothing from elsewhere, nothing inline, and nobody frames it: what a document, a model's answer or
# a file name smuggles into the page can neither run nor call out.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # kept by the browser and asked for again each time: a 304 unless the server was upgraded
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


# The site's theme has small scripts and styles in its pages, which nobody else writes to.
SITE_HEADERS = {
    **HEADERS,
    "Content-Security-Policy": re.sub(
        "(script|style)-src 'self'", r"\g<0> 'unsafe-inline'", POLICY
    ),
}


def ui_routes(folder: Path = FOLDER, site: Path = SITE) -> APIRouter:
    """Reads the files of the page once, now, and each of the documentation when it is wanted."""
    routes = APIRouter(include_in_schema=False)
    assets = read_assets(folder)
    pages, read_page = _find_files(site), cache(_read)

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return _reply(request, assets.get(PAGE))

    @routes.api_route("/ui/{path:path}", methods=["GET", "HEAD"])
    async def asset(request: Request, path: str) -> Response:
        return _reply(request, assets.get(path))

    @routes.get("/docs")
    async def docs() -> Response:
        return RedirectResponse("docs/")

    @routes.api_route("/docs/{path:path}", methods=["GET", "HEAD"])
    async def documentation(request: Request, path: str) -> Response:
        if not pages:
            way_out = "build it in a clone with `make site`, or read docs/ there"
            raise ApiError(404, f"the documentation is not here; {way_out}", code="not_found")
        file = pages.get(path or PAGE)
        return _reply(request, None if file is None else read_page(file), SITE_HEADERS)

    return routes


def _reply(request: Request, asset: Asset | None, always: Mapping[str, str] = HEADERS) -> Response:
    if asset is None:
        raise ApiError(404, f"GET {request.url.path} is not served here", code="not_found")
    headers = {**always, "ETag": asset.etag}
    if _is_known(request.headers.get("if-none-match", ""), asset.etag):
        return Response(status_code=304, headers=headers)
    body = asset.body
    if asset.packed is not None and _takes_gzip(request.headers.get("accept-encoding", "")):
        body, headers["Content-Encoding"] = asset.packed, "gzip"
    headers["Content-Length"] = str(len(body))
    sent = b"" if request.method == "HEAD" else body
    return Response(sent, headers=headers, media_type=asset.media_type)


def _is_known(header: str, etag: str) -> bool:
    """Whether the browser has this content. A proxy that compresses may have marked it as weak."""
    known = {tag.strip().removeprefix("W/") for tag in header.split(",")}
    return etag in known or "*" in known


def _takes_gzip(header: str) -> bool:
    for offer in header.lower().split(","):
        name, _, quality = offer.partition(";")
        if name.strip() in ("gzip", "*"):
            return quality.strip().replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
