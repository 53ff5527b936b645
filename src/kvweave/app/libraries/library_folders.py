"""Where knowledge bases lie, by name and tenant.

    <root>/NAME/             a knowledge base of those who have no tenant
    <root>/@TENANT/NAME/     one of a tenant; no other tenant can name it

Nothing is opened or made here. Any thread.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvweave.corpus.settings import read_settings
from kvweave.errors import ConfigError, CorpusError, RequestError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")  # no dot, no slash: never a path of its own
NAMES = "letters, digits, - and _, at most 64, a letter or digit first"


class NoSuchKnowledgeBase(CorpusError):
    """Nothing goes by that name here."""


class LibraryKey(NamedTuple):
    """Whose knowledge base, and which."""

    tenant: str  # "": of those without one
    name: str


class LibraryFolders:
    """Names and folders of knowledge bases."""

    def __init__(self, root: Path | None, folders: Mapping[LibraryKey, Path]) -> None:
        """`folders` lie elsewhere than below `root`; None: there are only those."""
        for place in folders:
            check_name(place.name)
            check_tenant(place.tenant)
        self._root = root
        self._folders = folders

    def names(self, tenant: str) -> list[str]:
        """Names of the tenant's knowledge bases, sorted."""
        named = {place.name for place in self._folders if place.tenant == tenant}
        root = self._root_of(tenant)
        if root is not None and root.is_dir():
            found = (p for p in root.iterdir() if NAME.fullmatch(p.name))
            named |= {p.name for p in found if is_library(p)}
        return sorted(named)

    def find(self, place: LibraryKey) -> Path | None:
        """Where a knowledge base lies, or would; None: it can be nowhere."""
        if place in self._folders:
            return self._folders[place]
        root = self._root_of(place.tenant)
        return None if root is None else root / place.name

    def get(self, place: LibraryKey) -> Path:
        """Where a knowledge base lies. Raises NoSuchKnowledgeBase."""
        folder = self.find(place)
        if folder is None:
            raise self.unknown(place)
        return folder

    def unknown(self, place: LibraryKey) -> NoSuchKnowledgeBase:
        """Say which knowledge bases there are instead."""
        known = ", ".join(self.names(place.tenant)[:8]) or "none yet"
        return NoSuchKnowledgeBase(f"no knowledge base {place.name!r} here; known: {known}")

    def changed_last(self, most: int) -> list[LibraryKey]:
        """The knowledge bases of all tenants that changed last, the very last one last."""
        root, places = self._root, set(self._folders)
        tenants = {""}
        if root is not None and root.is_dir():
            tenants |= {
                p.name[1:] for p in root.iterdir() if re.fullmatch(f"@{NAME.pattern}", p.name)
            }
        places |= {LibraryKey(tenant, name) for tenant in tenants for name in self.names(tenant)}
        changed: dict[LibraryKey, float] = {}
        for place in places:
            folder = self.get(place)
            if is_library(folder):
                files = folder.glob("catalogue.sqlite*")
                changed[place] = max((p.stat().st_mtime for p in files), default=0.0)
        return sorted(changed, key=lambda place: changed[place])[-most:]

    def document_bytes(self, tenant: str) -> int:
        """On the disk, of all knowledge bases of a tenant: their documents, vectors and indexes.
        Chunk KV can be made again and has a budget of its own."""
        total = 0
        for name in self.names(tenant):
            folder = self.get(LibraryKey(tenant, name))
            for file in (*folder.glob("catalogue.sqlite*"), *(folder / "index").glob("*")):
                with suppress(FileNotFoundError):
                    total += file.stat().st_size
        return total

    def _root_of(self, tenant: str) -> Path | None:
        return self._root / f"@{tenant}" if self._root is not None and tenant else self._root


def is_library(folder: Path) -> bool:
    """Whether a knowledge base lies there, sound or not."""
    try:
        return read_settings(folder) is not None
    except CorpusError:
        return True


def check_name(name: str) -> str:
    """Raises RequestError unless `name` may name a knowledge base."""
    if not NAME.fullmatch(name):
        shown = name if len(name) <= 64 else f"{name[:64]}…"
        raise RequestError(f"{shown!r} cannot name a knowledge base; use {NAMES}")
    return name


def check_tenant(tenant: str) -> str:
    """Raises ConfigError unless `tenant` is empty or may name a tenant."""
    if tenant and not NAME.fullmatch(tenant):
        raise ConfigError(f"{tenant!r} cannot name a tenant; use {NAMES}")
    return tenant
