"""Stored chunk KV as `kvweave cache` sees it: files, their headers, what is wrong with them."""

from pathlib import Path
from typing import Any

from kvweave.errors import ConfigError, TierCorrupt, TierError, TierForeign
from kvweave.kv.config import DiskTierConfig
from kvweave.kv.format.header import PRELUDE_BYTES, Header, needed_header_bytes, parse_header
from kvweave.kv.keys import ChunkKey, context_of
from kvweave.kv.tiers.base import StoredObject
from kvweave.kv.tiers.disk import DiskTier


def open_folder(store: Path, *, sweep: bool = False) -> DiskTier:
    """The tier in a folder, which must be one: a typo must not make a new store."""
    if not (store / "objects").is_dir():
        raise ConfigError(f"{store} holds no chunk KV; give the folder `kvweave ingest` wrote to")
    return DiskTier(DiskTierConfig(store), sweep=sweep)


def resolve(tier: DiskTier, text: str) -> ChunkKey:
    """The one key whose hexadecimal form, or whose content part, starts with `text`."""
    names = {each.key: each.key.hex() for each in tier.scan()}
    text = text.rstrip("…").lower()
    matches = [key for key, name in names.items() if name.startswith(text)]
    matches = matches or [key for key, name in names.items() if name[16:].startswith(text)]
    if len(text) < 4 or len(matches) != 1:
        raise ConfigError(f"{text!r} names {len(matches)} objects; give more digits of one key")
    return matches[0]


def header_of(tier: DiskTier, key: ChunkKey) -> Header | None:
    """The header of an object; None if it went away. Raises as `parse_header` does."""
    reader = tier.open(key)
    if reader is None:
        return None
    try:
        raw = bytearray(min(PRELUDE_BYTES, reader.size_bytes))
        reader.read(0, memoryview(raw))
        needed = min(needed_header_bytes(raw), reader.size_bytes)
        if needed > len(raw):
            rest = bytearray(needed - len(raw))
            reader.read(len(raw), memoryview(rest))
            raw += rest
        return parse_header(raw, key, reader.size_bytes)
    finally:
        reader.close()


def describe(tier: DiskTier, stored: StoredObject) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": stored.key.hex(),
        "context": context_of(stored.key).hex(),
        "bytes": stored.size_bytes,
        "written": stored.written_s,
        **dict.fromkeys(("tokens", "layers", "codec", "dtype")),
    }
    try:
        header = header_of(tier, stored.key)
    except TierError as error:
        return {**row, "codec": kind_of(error)}
    if header is not None:
        row |= {"tokens": header.shape.num_tokens, "layers": len(header.layers)}
        row |= {"codec": header.codec, "dtype": header.shape.dtype}
    return row


def is_foreign(tier: DiskTier, stored: StoredObject) -> bool:
    try:
        header_of(tier, stored.key)
    except TierForeign:
        return True
    except TierError:
        return False
    return False


def kind_of(error: TierError) -> str:
    if isinstance(error, TierForeign):
        return "foreign"
    return "damaged" if isinstance(error, TierCorrupt) else "unreadable"
