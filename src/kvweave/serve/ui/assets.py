"""The files of the web page, in memory: each with its type, a name for its content and a compressed
copy. Only what lies in the folder when the server starts can be named, so no path leads out of it.
"""

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
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
    return {
        path.relative_to(folder).as_posix(): _read(path)
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
