"""A knowledge base as one file, and back: what cannot be made again, checked on both ways.

    manifest.json        version, and a checksum of each of the others
    kb.json              what it was made with
    catalogue.sqlite     documents, chunks, vectors, words, as of one moment

The vector index and chunk KV are left out: both are made again from these. A backup is taken beside
readers and writers.
"""

import hashlib
import io
import json
import os
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from kvweave.corpus.durable import sync
from kvweave.corpus.index.files import atomic_file
from kvweave.corpus.kb_folder import CATALOGUE
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.settings import FILE as SETTINGS
from kvweave.corpus.settings import read_settings
from kvweave.corpus.trouble import as_corpus_error
from kvweave.errors import CorpusDamaged, CorpusError

MANIFEST = "manifest.json"
VERSION = 1
PARTS = (SETTINGS, CATALOGUE)


class BackedUp(NamedTuple):
    """What a backup holds."""

    num_documents: int
    num_chunks: int
    num_bytes: int  # of the file


def backup(folder: Path, file: Path) -> BackedUp:
    """Write the knowledge base in `folder` to `file`, which appears whole or not at all. One that
    is damaged is refused: it would push out a backup that is not. Raises CorpusError."""
    if file.exists():
        raise CorpusError(f"{file} is there already; name another file")
    with TemporaryDirectory(prefix=".kvweave-backup-", dir=_parent(file)) as held:
        copy = Path(held)
        with KnowledgeBase.open(folder) as kb:
            settings, path = (folder / SETTINGS).read_bytes(), kb.catalogue.path
            (copy / SETTINGS).write_bytes(settings)
            with (
                closing(sqlite3.connect(path)) as source,
                closing(sqlite3.connect(copy / CATALOGUE)) as target,
            ):
                source.backup(target)  # of one moment, whoever writes meanwhile
                target.execute("PRAGMA journal_mode = DELETE")  # one file, without a log
        with KnowledgeBase.open(copy) as kept:
            problems, totals = kept.catalogue.problems(), kept.totals()
        if problems:
            raise CorpusDamaged(f"{folder} is damaged and not backed up: {'; '.join(problems[:4])}")
        with closing(sqlite3.connect(copy / CATALOGUE)) as target:
            target.execute("PRAGMA journal_mode = DELETE")
        sums = {part: _sum(copy / part) for part in PARTS}
        manifest = json.dumps({"version": VERSION, "sha256": sums}, indent=1).encode()
        try:
            with atomic_file(file) as out, tarfile.open(fileobj=out, mode="w") as archive:
                info = tarfile.TarInfo(MANIFEST)
                info.size = len(manifest)
                archive.addfile(info, io.BytesIO(manifest))
                for part in PARTS:
                    archive.add(copy / part, part, recursive=False)
        except OSError as error:
            raise as_corpus_error(error, f"cannot write {file}", "; name another file") from error
    return BackedUp(totals.num_documents, totals.num_chunks, file.stat().st_size)


def restore(file: Path, folder: Path) -> BackedUp:
    """Make `folder`, which is new or empty, of a backup. It appears when all of it is checked.
    Raises CorpusError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CorpusError(f"{folder} is there already; name a new folder, or remove that one first")
    with TemporaryDirectory(prefix=".kvweave-restore-", dir=_parent(folder)) as held:
        copy = Path(held) / "kb"
        copy.mkdir()
        _unpack(file, copy)
        if read_settings(copy) is None:
            raise CorpusDamaged(f"{file} has no {SETTINGS}")
        with KnowledgeBase.open(copy) as kb:
            problems, totals = kb.catalogue.problems(), kb.totals()
        if problems:
            raise CorpusDamaged(f"{file} holds a damaged catalogue: {'; '.join(problems[:4])}")
        for part in copy.iterdir():
            sync(part)
        sync(copy)
        try:
            os.replace(copy, folder)  # an empty folder makes way
        except OSError as error:
            raise as_corpus_error(error, f"cannot make {folder}", "; name another") from error
        sync(folder.parent)
    return BackedUp(totals.num_documents, totals.num_chunks, file.stat().st_size)


def _unpack(file: Path, into: Path) -> None:
    """The parts by their names alone, whatever else the archive says, and only with their sums."""
    try:
        with tarfile.open(file, "r:") as archive:
            manifest = archive.extractfile(MANIFEST)
            told = json.loads(manifest.read(1 << 20)) if manifest is not None else {}
            if told.get("version") != VERSION:
                raise CorpusError(
                    f"{file} has version {told.get('version')!r}, this kvweave reads {VERSION}"
                )
            for part in PARTS:
                source = archive.extractfile(part)
                if source is None:
                    raise CorpusDamaged(f"{file} has no {part}")
                with (into / part).open("wb") as target:
                    while piece := source.read(1 << 20):
                        target.write(piece)
                if _sum(into / part) != told["sha256"][part]:
                    raise CorpusDamaged(f"{file} is damaged: {part} is not what was backed up")
    except (tarfile.TarError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorpusDamaged(f"{file} is no backup of a knowledge base ({error})") from error
    except OSError as error:
        raise as_corpus_error(error, f"cannot read {file}") from error


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parent(path: Path) -> Path:
    """Of what is about to be made: made itself if need be, so that a rename stays on one disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise as_corpus_error(error, f"cannot make {path.parent}") from error
    return path.parent
