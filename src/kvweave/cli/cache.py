"""`kvweave cache`: look at a folder of chunk KV, check it, clean it.

Works on the files alone: no model, no torch unless bytes are verified. Safe beside a running
server, which takes what disappears for an ordinary miss.
"""

import json
import time
from pathlib import Path
from typing import Any

import click

from kvweave.cli.cache_objects import describe, is_foreign, kind_of, open_folder, resolve
from kvweave.cli.cache_view import ago, mib, show_table
from kvweave.errors import TierError
from kvweave.kv.keys import context_of
from kvweave.kv.tiers.base import StoredObject

store_option = click.option(
    "--store", type=click.Path(path_type=Path), required=True, help="Folder of chunk KV."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document.")


@click.group(name="cache")
def command() -> None:
    """Look at stored chunk KV, check it, clean it."""


@command.command()
@store_option
@json_option
@click.option("--limit", default=50, show_default=True, help="Newest objects to list, 0 for all.")
def ls(store: Path, as_json: bool, limit: int) -> None:
    """List objects, newest first."""
    tier = open_folder(store)
    newest = sorted(tier.scan(), key=lambda o: -o.written_s)
    rows = [describe(tier, each) for each in newest[: limit or None]]
    if as_json:
        click.echo(json.dumps({"objects": rows, "total": len(newest)}))
        return
    show_table(
        f"{len(newest)} objects in {store}",
        ["key", "context", "tokens", "layers", "codec", "size", "written"],
        [
            [
                r["key"][16:32] + "…",
                *(r[field] for field in ("context", "tokens", "layers", "codec")),
                mib(r["bytes"]),
                ago(r["written"]),
            ]
            for r in rows
        ],
    )


@command.command()
@store_option
@json_option
def stat(store: Path, as_json: bool) -> None:
    """Objects and bytes per context: one model, preamble, tenant and codec each."""
    tier = open_folder(store)
    groups: dict[str, dict[str, Any]] = {}
    for each in tier.scan():
        name = context_of(each.key).hex()
        if name not in groups:
            groups[name] = {"objects": 0, "bytes": 0, "like": describe(tier, each)}
        groups[name]["objects"] += 1
        groups[name]["bytes"] += each.size_bytes
    summary = {
        "objects": sum(g["objects"] for g in groups.values()),
        "bytes": sum(g["bytes"] for g in groups.values()),
        "contexts": groups,
        "quarantined": len(tier.quarantined()),
        "quarantined_bytes": tier.quarantined_bytes(),
        "temporaries": len(tier.temporaries()),
    }
    if as_json:
        click.echo(json.dumps(summary))
        return
    show_table(
        f"{summary['objects']} objects, {mib(summary['bytes'])} in {store}; "
        f"{summary['quarantined']} quarantined",
        ["context", "objects", "size", "codec", "dtype", "layers"],
        [
            [
                name,
                g["objects"],
                mib(g["bytes"]),
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

    tier = open_folder(store)
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
            kind = kind_of(error)
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
    tier = open_folder(store, sweep=not dry_run)  # opening removes what dead writers left
    newest_first = sorted(tier.scan(), key=lambda o: -o.written_s)
    oldest_s = 0.0 if max_age_days is None else time.time() - max_age_days * 86400
    doomed: list[StoredObject] = []
    kept_bytes = 0
    for each in newest_first:
        is_over = max_bytes is not None and kept_bytes + each.size_bytes > max_bytes
        is_named = context_of(each.key).hex() in contexts
        if is_over or is_named or each.written_s < oldest_s or (foreign and is_foreign(tier, each)):
            doomed.append(each)
        else:
            kept_bytes += each.size_bytes
    quarantine_bytes = tier.quarantined_bytes()
    if not dry_run:
        for each in doomed:
            tier.delete(each.key)
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
        click.echo(f"{verb} {mib(result['freed_bytes'])}: {len(doomed)} objects and quarantine")


@command.command()
@store_option
@json_option
@click.argument("keys", nargs=-1, required=True)
def rm(store: Path, as_json: bool, keys: tuple[str, ...]) -> None:
    """Delete objects by key, or by the first digits of one if only one object has them."""
    tier = open_folder(store)
    found = [resolve(tier, text) for text in keys]  # all or nothing: refuse before deleting
    deleted = sum(tier.delete(key) for key in found)
    click.echo(json.dumps({"deleted": deleted}) if as_json else f"deleted {deleted}")
