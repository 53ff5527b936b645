"""GET / and /ui/…: the web page. No key is needed for it; what it shows comes from /v1 with one."""

from pathlib import Path

from fastapi import APIRouter, Request, Response

from kvweave.serve.errors import ApiError
from kvweave.serve.ui.assets import FOLDER, PAGE, Asset, read_assets

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


def ui_routes(folder: Path = FOLDER) -> APIRouter:
    """Reads the files once, now."""
    routes = APIRouter(include_in_schema=False)
    assets = read_assets(folder)

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return _reply(request, assets.get(PAGE))

    @routes.api_route("/ui/{path:path}", methods=["GET", "HEAD"])
    async def asset(request: Request, path: str) -> Response:
        return _reply(request, assets.get(path))

    return routes


def _reply(request: Request, asset: Asset | None) -> Response:
    if asset is None:
        raise ApiError(404, f"GET {request.url.path} is not served here", code="not_found")
    headers = {**HEADERS, "ETag": asset.etag}
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
