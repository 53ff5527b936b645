"""Commands against a running server (`--url`): what they do there, and how it is shown here."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvweave.clients.server import Reply, ServerClient, ServerFailed
from kvweave.errors import CorpusError, RequestError

if TYPE_CHECKING:
    from kvweave.ingest.sources import Selection


def ask(
    client: ServerClient, question: str, fields: Mapping[str, Any], *, as_json: bool, stats: bool
) -> None:
    """One question; the answer on stdout as it comes, or the whole reply as JSON."""
    messages = [{"role": "user", "content": question}]
    if as_json:
        click.echo(json.dumps(client.chat(messages, **fields), indent=2))
        return
    options = {"stream_options": {"include_usage": True}}
    end: Reply = {}
    for event in client.chat_events(messages, **fields, **options):
        for choice in event["choices"]:
            sys.stdout.write(choice["delta"].get("content") or "")
            sys.stdout.flush()
        end |= {name: event[name] for name in ("sources", "usage", "explain") if event.get(name)}
    sys.stdout.write("\n")
    if fields.get("cite"):
        for source in end.get("sources", ()):
            title = source["title"] or source["chunk"][:8]
            click.echo(f"[{source['cited_as']}] {title}", err=True)
    if "explain" in end and fields.get("explain"):
        click.echo(json.dumps(end["explain"], indent=2), err=True)
    if stats and "usage" in end:
        usage = end["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        held = "" if cached is None else f" ({cached:,} cached)"
        words = f"{usage['prompt_tokens']:,} prompt{held} + {usage['completion_tokens']:,} answer"
        click.secho(f"{words} tokens · {client.url}", dim=True, err=True)


def upload(
    client: ServerClient,
    kb: str,
    paths: Sequence[Path],
    selection: "Selection",
    metadata: Mapping[str, Any],
    *,
    wait_for_kv: bool,
    as_json: bool,
) -> bool:
    """Files and the files of folders, one by one. False: some did not get in."""
    from kvweave.corpus.parsers import ParseLimits, read_bytes
    from kvweave.ingest.report import Skipped
    from kvweave.ingest.sources import FoundFile, find_files

    counts = {"added": 0, "updated": 0, "unchanged": 0, "new_chunks": 0}
    skipped: list[dict[str, str]] = []
    for path in paths:
        for found in find_files(path, selection):
            if isinstance(found, Skipped):
                skipped.append(found._asdict())
            elif isinstance(found, FoundFile):
                name = shown_name(path, found.path)
                try:
                    data = read_bytes(found.path, ParseLimits())
                    reply = client.upload_file(
                        kb, name, data, metadata=metadata, wait_for_kv=wait_for_kv
                    )
                except (ServerFailed, CorpusError, OSError) as error:
                    if isinstance(error, ServerFailed) and error.status != 400:
                        raise  # the next one would fare no better
                    skipped.append({"source": str(found.path), "reason": str(error)})
                    continue
                for each in counts:
                    counts[each] += reply[each]
                skipped += reply["skipped"]
    if as_json:
        click.echo(json.dumps({"kb": kb, "url": client.url, **counts, "skipped": skipped}))
    else:
        click.echo(
            f"{counts['added']:,} added, {counts['updated']:,} updated, {counts['unchanged']:,} "
            f"unchanged, {counts['new_chunks']:,} new chunks in {kb!r} at {client.url}"
        )
        for left in skipped:
            click.echo(f"skipped {left['source']}: {left['reason']}", err=True)
    return not skipped


def shown_name(start: Path, file: Path) -> str:
    """What a file is called on the server, where folders are cut off: files of one name in two
    folders are two documents."""
    root = start.expanduser().resolve()
    parts = file.relative_to(root).parts if root.is_dir() and file.is_relative_to(root) else ()
    return ":".join(parts) or file.name


def find_document(client: ServerClient, kb: str, reference: str) -> Reply:
    """One document by its id, the beginning of its id (6 or more characters), or its source."""
    documents = client.documents(kb)
    found = [
        d for d in documents if reference in (d["id"], d["source"], d["source"].partition(":")[2])
    ]
    if not found and len(reference) >= 6:
        found = [d for d in documents if d["id"].startswith(reference)]
    if not found:
        raise RequestError(f"{kb!r} at {client.url} has no document {reference!r}; see docs ls")
    if len(found) > 1:
        raise RequestError(f"{reference!r} names {len(found)} documents; give more of it")
    return found[0]
