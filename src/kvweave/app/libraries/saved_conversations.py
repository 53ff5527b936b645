"""Conversations that a web page keeps for holders of API keys: one JSON file each, by tenant.

    <folder>/@TENANT/ID.json       "@" alone: of those without a tenant

Written whole and renamed, so that a kill leaves the old one or the new one. Any thread; changes of
one tenant take turns. What is kept is bounded: the one that was changed longest ago makes way.
"""

import json
import threading
from pathlib import Path
from typing import Any, NamedTuple

from kvweave.app.libraries.library_folders import NAME, NAMES
from kvweave.corpus.disk_files import atomic_file, make_folder
from kvweave.errors import CorpusError, RequestError
from kvweave.paths import sync

MOST = 200  # of one tenant
MOST_BYTES = 1 << 20  # of one of them


class NoSuchConversation(RequestError):
    """Nothing is kept under that id."""


class ConversationLine(NamedTuple):
    """A conversation as a list shows it."""

    id: str
    title: str
    updated: float  # seconds since 1970, as its owner said
    num_messages: int


FileState = tuple[int, int, int]  # when it was written, bytes, which file it is


class SavedConversations:
    """Conversations that outlive the process."""

    def __init__(self, folder: Path, most: int = MOST) -> None:
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()
        # what was read of files for a list, as long as they stay as they were
        self._lines: dict[Path, tuple[FileState, ConversationLine | None]] = {}

    def all(self, tenant: str) -> list[ConversationLine]:
        """Newest first. Files that have not changed since the last time are not read again."""
        paths = self._files(tenant)
        lines = [line for path in paths if (line := self._line(path)) is not None]
        with self._lock:
            here = {path.parent for path in paths}
            for path in [p for p in self._lines if p.parent in here and p not in set(paths)]:
                del self._lines[path]
        return sorted(lines, key=lambda line: -line.updated)

    def _line(self, path: Path) -> ConversationLine | None:
        try:
            seen = path.stat()
        except OSError:
            return None  # deleted since it was listed
        state = (seen.st_mtime_ns, seen.st_size, seen.st_ino)
        known = self._lines.get(path)
        if known is not None and known[0] == state:
            return known[1]
        found, line = _read(path), None
        if found is not None:
            updated, messages = float(found["updated"]), found["messages"]
            line = ConversationLine(path.stem, found["title"], updated, len(messages))
        with self._lock:
            self._lines[path] = (state, line)
        return line

    def get(self, tenant: str, name: str) -> dict[str, Any]:
        """Raises NoSuchConversation."""
        found = _read(self._path(tenant, name))
        if found is None:
            raise _unknown(name)
        return found

    def put(self, tenant: str, name: str, conversation: dict[str, Any]) -> None:
        """Keep `conversation` (title, messages, updated), in place of an older one. Raises
        RequestError if it is too long, CorpusError if it cannot be written."""
        path = self._path(tenant, name)
        text = json.dumps(conversation, ensure_ascii=False).encode(errors="replace")
        if len(text) > MOST_BYTES:
            message = f"a conversation may have {MOST_BYTES >> 20} MiB, this one has {len(text):,}"
            raise RequestError(f"{message} bytes; begin another one")
        with self._lock:
            try:
                make_folder(path.parent)
                with atomic_file(path) as file:
                    file.write(text)
                for old in self._oldest_first(tenant)[: -self._most]:
                    old.unlink(missing_ok=True)
            except OSError as error:
                raise CorpusError(f"cannot keep the conversation: {error.strerror}") from error

    def delete(self, tenant: str, name: str) -> None:
        """Raises NoSuchConversation."""
        path = self._path(tenant, name)
        with self._lock:
            try:
                path.unlink()
                sync(path.parent)  # or a power cut could bring it back
            except FileNotFoundError:
                raise _unknown(name) from None
            except OSError as error:
                raise CorpusError(f"cannot delete the conversation: {error.strerror}") from error

    def _oldest_first(self, tenant: str) -> list[Path]:
        return sorted(self._files(tenant), key=lambda path: path.stat().st_mtime_ns)

    def _files(self, tenant: str) -> list[Path]:
        folder = self._folder / f"@{tenant}"
        return [path for path in folder.glob("*.json") if NAME.fullmatch(path.stem)]

    def _path(self, tenant: str, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise RequestError(f"{name[:64]!r} cannot name a conversation; use {NAMES}")
        return self._folder / f"@{tenant}" / f"{name}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """None: it is not there, or is none of ours."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    is_whole = isinstance(found, dict) and {"title", "messages", "updated"} <= found.keys()
    return found if is_whole else None


def _unknown(name: str) -> NoSuchConversation:
    return NoSuchConversation(f"no conversation {name!r} is kept here")
