"""`kvweave cache`: look at a place of chunk KV, check it, clean it.

Works on the objects alone: no model, no torch unless bytes are verified or a server has them. Safe
beside a running server, which takes what disappears for an ordinary miss.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from kvweave.cli.options import json_option
from kvweave.config import load_config
from kvweave.errors import ConfigError, TierCorrupt, TierError, TierForeign
from kvweave.kv.format.header import PRELUDE_BYTES, Header, needed_header_bytes, parse_header
from kvweave.kv.format.keys import ChunkKey, context_of
from kvweave.kv.tiers.base import StoredObject, Tier
from kvweave.kv.tiers.config import DiskTierConfig
from kvweave.kv.tiers.disk import DiskTier

REMOTE = ("redis", "s3")  # tiers that settings name

store_option = click.option(
    "--store",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder of chunk KV or of a knowledge base; redis or s3 for the tier of your settings.",
)


@click.group(name="cache")
def command() -> None:
    """Look at stored chunk KV, check it, clean it."""


@command.command()
@store_option
@json_option
@click.option("--limit", default=50, show_default=True, help="Newest objects to list, 0 for all.")
def ls(store: Path, as_json: bool, limit: int) -> None:
    """List objects, newest first."""
    tier = _open_store(store)
    newest = sorted(tier.scan(), key=lambda o: -o.written_s)
    rows = [_describe(tier, each) for each in newest[: limit or None]]
    if as_json:
        click.echo(json.dumps({"objects": rows, "total": len(newest)}))
        return
    _show_table(
        f"{len(newest)} objects in {store}",
        ["key", "context", "tokens", "layers", "codec", "size", "written"],
        [
            [
                r["key"][16:32] + "…",
                *(r[field] for field in ("context", "tokens", "layers", "codec")),
                _mib(r["bytes"]),
                _ago(r["written"]),
            ]
            for r in rows
        ],
    )


@command.command()
@store_option
@json_option
def stat(store: Path, as_json: bool) -> None:
    """Objects and bytes per context: one model, preamble, tenant and codec each."""
    tier = _open_store(store)
    groups: dict[str, dict[str, Any]] = {}
    for each in tier.scan():
        name = context_of(each.key).hex()
        if name not in groups:
            groups[name] = {"objects": 0, "bytes": 0, "like": _describe(tier, each)}
        groups[name]["objects"] += 1
        groups[name]["bytes"] += each.size_bytes
    summary = {
        "objects": sum(g["objects"] for g in groups.values()),
        "bytes": sum(g["bytes"] for g in groups.values()),
        "contexts": groups,
        "quarantined": len(tier.quarantined_files()) if isinstance(tier, DiskTier) else 0,
        "quarantined_bytes": _quarantined_bytes(tier),
        "temporaries": len(tier.temporaries()) if isinstance(tier, DiskTier) else 0,
    }
    if as_json:
        click.echo(json.dumps(summary))
        return
    _show_table(
        f"{summary['objects']} objects, {_mib(summary['bytes'])} in {store}; "
        f"{summary['quarantined']} quarantined",
        ["context", "objects", "size", "codec", "dtype", "layers"],
        [
            [
                name,
                g["objects"],
                _mib(g["bytes"]),
                *(g["like"][field] for field in ("codec", "dtype", "layers")),
            ]
            for name, g in groups.items()
        ],
    )


@command.command()
@store_option
@json_option
@click.option("--repair", is_flag=True, help="Move damaged objects to quarantine.")
def verify(store: Path, as_json: bool, repair: bool) -> None:
    """Read every byte of every object and check it. Exit code 1 if something is damaged."""
    from kvweave.kv.format.objects import verify_object

    tier = _open_store(store)
    counts = {"ok": 0, "damaged": 0, "foreign": 0, "unreadable": 0, "quarantined": 0}
    problems: list[dict[str, str]] = []
    for each in tier.scan():
        reader = None
        try:
            reader = tier.open(each.key)
            if reader is None:
                continue  # deleted meanwhile
            verify_object(reader, each.key)
            counts["ok"] += 1
        except TierError as error:
            kind = _kind_of(error)
            counts[kind] += 1
            problems.append({"key": each.key.hex(), "problem": kind, "detail": str(error)})
            if repair and kind == "damaged":
                counts["quarantined"] += tier.quarantine(each.key)
        finally:
            if reader is not None:
                reader.close()
    if as_json:
        click.echo(json.dumps({**counts, "problems": problems}))
    else:
        for problem in problems:
            click.echo(f"{problem['key'][:32]}… {problem['problem']}: {problem['detail']}")
        click.echo(
            ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "empty"
        )
    if counts["damaged"] + counts["unreadable"]:
        raise SystemExit(1)


@command.command()
@store_option
@json_option
@click.option("--max-bytes", type=int, help="Delete the oldest objects beyond this many bytes.")
@click.option("--max-age-days", type=float, help="Delete objects written longer ago.")
@click.option("--context", "contexts", multiple=True, help="Delete all objects of a context.")
@click.option("--foreign", is_flag=True, help="Delete objects of other kvweave versions.")
@click.option("--dry-run", is_flag=True, help="Say what would go, delete nothing.")
def gc(
    store: Path,
    as_json: bool,
    max_bytes: int | None,
    max_age_days: float | None,
    contexts: tuple[str, ...],
    foreign: bool,
    dry_run: bool,
) -> None:
    """Free space: leftovers of dead writers and quarantine always, objects by the options."""
    tier = _open_store(store, sweep=not dry_run)  # opening removes what dead writers left
    if max_age_days is not None and tier.name == "redis":
        raise ConfigError("a redis server does not say how old objects are; set store.redis_ttl_s")
    oldest_s = 0.0 if max_age_days is None else time.time() - max_age_days * 86400
    doomed: list[StoredObject] = []
    kept_bytes = 0
    for each in sorted(tier.scan(), key=lambda o: -o.written_s):
        is_over = max_bytes is not None and kept_bytes + each.size_bytes > max_bytes
        is_named = each.written_s < oldest_s or context_of(each.key).hex() in contexts
        if is_over or is_named or (foreign and _is_foreign(tier, each)):
            doomed.append(each)
        else:
            kept_bytes += each.size_bytes
    quarantine_bytes = _quarantined_bytes(tier)
    if not dry_run:
        for each in doomed:
            tier.delete(each.key)
        if isinstance(tier, DiskTier):
            tier.clear_quarantine()
    result = {
        "deleted": len(doomed),
        "freed_bytes": sum(each.size_bytes for each in doomed) + quarantine_bytes,
        "kept_bytes": kept_bytes,
        "dry_run": dry_run,
    }
    if as_json:
        click.echo(json.dumps(result))
    else:
        verb = "would free" if dry_run else "freed"
        click.echo(f"{verb} {_mib(result['freed_bytes'])}: {len(doomed)} objects and quarantine")


@command.command()
@store_option
@json_option
@click.argument("keys", nargs=-1, required=True)
def rm(store: Path, as_json: bool, keys: tuple[str, ...]) -> None:
    """Delete objects by key, or by the first digits of one if only one object has them."""
    tier = _open_store(store)
    found = [_resolve(tier, text) for text in keys]  # all or nothing: refuse before deleting
    deleted = sum(tier.delete(key) for key in found)
    click.echo(json.dumps({"deleted": deleted}) if as_json else f"deleted {deleted}")


def _open_store(store: Path, *, sweep: bool = False) -> Tier:
    """The tier in a folder, which must be one: a typo must not make a new store. Or the one that
    the settings name."""
    if str(store) in REMOTE and not store.exists():
        return _open_remote(str(store))
    folders = kv_folders(store)
    if not folders:
        raise ConfigError(f"{store} holds no chunk KV; give the folder `kvweave ingest` wrote to")
    if len(folders) > 1:
        named = ", ".join(map(str, folders))
        raise ConfigError(f"{store} has chunk KV in several folders; give one of {named}")
    return DiskTier(DiskTierConfig(folders[0]), sweep=sweep)


def kv_folders(store: Path) -> list[Path]:
    """Folders of chunk KV: this one, or those of the knowledge base that it is."""
    candidates = [store, store / "kv"]
    with suppress(OSError, ValueError, KeyError):  # else all of it lies in the knowledge base
        candidates += map(Path, json.loads((store / "kv" / "places.json").read_text())["disks"])
    return [folder for folder in candidates if (folder / "objects").is_dir()]


def _open_remote(name: str) -> Tier:
    from kvweave.app.library.store_tiers import remote_tiers
    from kvweave.kv.tiers import open_tier

    found = [cfg for cfg in remote_tiers(load_config().config.store) if cfg.kind == name]
    if not found:
        raise ConfigError(f"no {name} tier is set; set store.{name}_url, or give a folder")
    return open_tier(found[0])


def _quarantined_bytes(tier: Tier) -> int:
    return tier.quarantined_bytes() if isinstance(tier, DiskTier) else 0


def _resolve(tier: Tier, text: str) -> ChunkKey:
    """The one key whose hexadecimal form, or whose content part, starts with `text`."""
    names = {each.key: each.key.hex() for each in tier.scan()}
    text = text.rstrip("…").lower()
    matches = [key for key, name in names.items() if name.startswith(text)]
    matches = matches or [key for key, name in names.items() if name[16:].startswith(text)]
    if len(text) < 4 or len(matches) != 1:
        raise ConfigError(f"{text!r} names {len(matches)} objects; give more digits of one key")
    return matches[0]


def header_of(tier: Tier, key: ChunkKey) -> Header | None:
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


def _describe(tier: Tier, stored: StoredObject) -> dict[str, Any]:
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
        return {**row, "codec": _kind_of(error)}
    if header is not None:
        row |= {"tokens": header.shape.num_tokens, "layers": len(header.layers)}
        row |= {"codec": header.codec, "dtype": header.shape.dtype}
    return row


def _is_foreign(tier: Tier, stored: StoredObject) -> bool:
    try:
        header_of(tier, stored.key)
    except TierForeign:
        return True
    except TierError:
        return False
    return False


def _kind_of(error: TierError) -> str:
    if isinstance(error, TierForeign):
        return "foreign"
    return "damaged" if isinstance(error, TierCorrupt) else "unreadable"


def _show_table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    from kvweave.cli.tables import make_table, table_console

    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    console = table_console()
    console.print(title, soft_wrap=True)
    console.print(make_table(columns, cells, right=("tokens", "layers", "objects", "size")))


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.1f} MiB"


def _ago(written_s: float) -> str:
    if not written_s:
        return "–"  # a server does not say
    elapsed_s = max(0.0, time.time() - written_s)
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if elapsed_s >= seconds:
            return f"{elapsed_s / seconds:.0f} {unit} ago"
    return "now"
