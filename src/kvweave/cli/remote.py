"""Commands against a running server (`--url`): what they do there, and how it is shown here."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from kvweave.cli.web_pages import fetch_pages
from kvweave.clients.server import Reply, ServerClient, ServerFailed
from kvweave.corpus.parsers import ParseLimits, read_bytes
from kvweave.errors import CorpusError, RequestError
from kvweave.ingest.report import Skipped
from kvweave.ingest.sources import FileBytes, FoundFile, Selection, find_files


def ask(
    client: ServerClient,
    messages: Sequence[Mapping[str, Any]],
    fields: Mapping[str, Any],
    *,
    as_json: bool,
    stats: bool,
) -> None:
    """One question, last of `messages`; the answer on stdout as it comes, or the whole reply as
    JSON."""
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
    _tell_end(end, fields, client.url if stats else None)


def _tell_end(end: Reply, fields: Mapping[str, Any], url: str | None) -> None:
    """What stands on stderr below an answer; the line about tokens where `url` says whose it is."""
    if fields.get("cite"):
        for source in end.get("sources", ()):
            title = source["title"] or source["chunk"][:8]
            click.echo(f"[{source['cited_as']}] {title}", err=True)
    if "explain" in end and fields.get("explain"):
        click.echo(json.dumps(end["explain"], indent=2), err=True)
    if url is not None and "usage" in end:
        usage = end["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        held = "" if cached is None else f" ({cached:,} cached)"
        words = f"{usage['prompt_tokens']:,} prompt{held} + {usage['completion_tokens']:,} answer"
        click.secho(f"{words} tokens · {url}", dim=True, err=True)


@dataclass(slots=True)
class UploadCounts:
    """What became of an upload of many files."""

    added: int = 0
    updated: int = 0
    unchanged: int = 0
    new_chunks: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)

    def add(self, reply: Reply) -> None:
        self.added += reply["added"]
        self.updated += reply["updated"]
        self.unchanged += reply["unchanged"]
        self.new_chunks += reply["new_chunks"]
        self.skipped += reply["skipped"]

    @property
    def is_in_vain(self) -> bool:
        """Whether there were files and the server took none of them."""
        return bool(self.skipped) and not (self.added or self.updated or self.unchanged)

    def show(self, kb: str, url: str, *, as_json: bool) -> None:
        if as_json:
            click.echo(json.dumps({"kb": kb, "url": url, **asdict(self)}))
            return
        if self.is_in_vain:
            click.echo(f"nothing was taken in by {url}: every file was refused", err=True)
        else:
            click.echo(
                f"{self.added:,} added, {self.updated:,} updated, {self.unchanged:,} unchanged, "
                f"{self.new_chunks:,} new chunks in {kb!r} at {url}"
            )
        for left in self.skipped:
            click.echo(f"skipped {left['source']}: {left['reason']}", err=True)


def upload(
    client: ServerClient,
    kb: str,
    paths: Sequence[Path],
    selection: Selection,
    metadata: Mapping[str, Any],
    *,
    pages: Sequence[str] = (),
    wait_for_kv: bool = False,
) -> UploadCounts:
    """Files, the files of folders and pages of the web, one by one."""
    counts = UploadCounts()
    for item in _find_items(paths, selection, pages):
        if isinstance(item, Skipped):
            counts.skipped.append(item._asdict())
            continue
        said = {**item.metadata, **metadata}
        try:
            reply = client.upload_file(
                kb, item.name, item.data, metadata=said, wait_for_kv=wait_for_kv
            )
        except ServerFailed as error:
            if error.status != 400:
                raise  # the next one would fare no better
            counts.skipped.append({"source": item.name, "reason": str(error)})
            continue
        counts.add(reply)
    return counts


def _find_items(
    paths: Sequence[Path], selection: Selection, pages: Sequence[str]
) -> Iterator[FileBytes | Skipped]:
    limits = ParseLimits()
    for path in paths:
        for found in find_files(path, selection):
            if isinstance(found, Skipped):
                yield found
            elif isinstance(found, FoundFile):
                try:
                    data = read_bytes(found.path, limits)
                except (CorpusError, OSError) as error:
                    yield Skipped(str(found.path), str(error))
                    continue
                yield FileBytes(shown_name(path, found.path), data)
    for page in fetch_pages(list(pages), limits.file_bytes):
        if isinstance(page, FileBytes):
            yield replace(page, name=page.name.replace("/", ":"))  # folders are cut off there
        else:
            yield page


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
