"""A knowledge base as one file, and back: what cannot be made again, checked on both ways.

    manifest.json        version, and a checksum of each of the others
    kb.json              what it was made with
    catalogue.sqlite     documents, chunks, vectors, words, as of one moment

The vector index and chunk KV are left out: both are made again from these. A backup is taken beside
readers and writers. It may come from anybody: what is restored has names of its own, and no index
on a server that the backup named.
"""

import fcntl
import io
import json
import os
import shutil
import sqlite3
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from kvweave.corpus.catalogue import Catalogue
from kvweave.corpus.disk_files import as_corpus_error
from kvweave.corpus.index import AUTO, is_remote
from kvweave.corpus.kb_folder import CATALOGUE
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.settings import FILE as SETTINGS
from kvweave.corpus.settings import read_settings, write_settings
from kvweave.errors import CorpusDamaged, CorpusError
from kvweave.paths import sha256_of, sync

MANIFEST = "manifest.json"
VERSION = 1
PARTS = (SETTINGS, CATALOGUE)
SMALL_BYTES = 1 << 20  # that manifest and settings have at most
WORK = ".kvweave-work-"  # begins the name of a folder that a backup or a restore works in


class BackedUp(NamedTuple):
    """What a backup holds."""

    num_documents: int
    num_chunks: int
    num_bytes: int  # of the file
    left_index: str | None = None  # on a server, that what was restored does not use


def backup(folder: Path, file: Path) -> BackedUp:
    """Write the knowledge base in `folder` to `file`, which appears whole or not at all. One that
    is damaged is refused: it would push out a backup that is not. Raises CorpusError."""
    if os.path.lexists(file):
        raise CorpusError(f"{file} is there already; name another file")
    with _work_folder(file.parent) as work:
        try:
            with KnowledgeBase.open(folder) as kb:
                (work / SETTINGS).write_bytes((folder / SETTINGS).read_bytes())
                _copy_catalogue(kb.catalogue.path, work / CATALOGUE)
            with KnowledgeBase.open(work) as kept:
                problems, totals = kept.catalogue.problems(), kept.totals()
            if problems:
                shown = "; ".join(problems[:4])
                raise CorpusDamaged(f"{folder} is damaged and not backed up: {shown}")
            _leave_wal(work / CATALOGUE)
            sums = {part: sha256_of(work / part) for part in PARTS}
            manifest = json.dumps({"version": VERSION, "sha256": sums}, indent=1).encode()
            whole = work / "backup"
            with tarfile.open(whole, mode="w") as archive:
                info = tarfile.TarInfo(MANIFEST)
                info.size = len(manifest)
                archive.addfile(info, io.BytesIO(manifest))
                for part in PARTS:
                    archive.add(work / part, part, recursive=False)
            sync(whole)
            num_bytes = whole.stat().st_size
            os.replace(whole, file)
            sync(file.parent)
        except (OSError, sqlite3.DatabaseError) as error:
            raise as_corpus_error(error, f"cannot write {file}", "; name another file") from error
    return BackedUp(totals.num_documents, totals.num_chunks, num_bytes)


def restore(file: Path, folder: Path) -> BackedUp:
    """Make `folder`, which is new or empty, of a backup. It appears when all of it is checked.
    Raises CorpusError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CorpusError(f"{folder} is there already; name a new folder, or remove that one first")
    with _work_folder(folder.parent) as work:
        try:
            copy = work / "kb"
            copy.mkdir()
            _unpack(file, copy)
            left_index = _rename_parts(file, copy)
            with KnowledgeBase.open(copy) as kb:
                problems, totals = kb.catalogue.problems(), kb.totals()
            if problems:
                raise CorpusDamaged(f"{file} holds a damaged catalogue: {'; '.join(problems[:4])}")
            for part in copy.iterdir():
                sync(part)
            sync(copy)
            os.replace(copy, folder)  # an empty folder makes way
            sync(folder.parent)
            num_bytes = file.stat().st_size
        except sqlite3.DatabaseError as error:
            raise CorpusDamaged(f"{file} holds no usable catalogue ({error})") from error
        except OSError as error:
            raise as_corpus_error(error, f"cannot make {folder}", "; name another") from error
    return BackedUp(totals.num_documents, totals.num_chunks, num_bytes, left_index)


def _unpack(file: Path, into: Path) -> None:
    """Write the parts into a folder, by their names alone, whatever else the archive says. Nothing
    is written that the file itself does not hold, byte for byte."""
    try:
        with tarfile.open(file, "r:") as archive:
            # no more than these: links and holes could stand for anything
            members = {member.name: member for member in _first_members(archive)}
            manifest = archive.extractfile(members[MANIFEST])
            told = json.loads(manifest.read()) if manifest is not None else {}
            if told.get("version") != VERSION:
                raise CorpusError(
                    f"{file} has version {told.get('version')!r}, this kvweave reads {VERSION}"
                )
            for part in PARTS:
                source = archive.extractfile(members[part])
                assert source is not None, "a plain file"
                with (into / part).open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                if sha256_of(into / part) != told["sha256"][part]:
                    raise CorpusDamaged(f"{file} is damaged: {part} is not what was backed up")
    except (tarfile.TarError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorpusDamaged(f"{file} is no backup of a knowledge base ({error})") from error
    except OSError as error:
        raise as_corpus_error(error, f"cannot read {file}") from error


def _first_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members that a backup has, each a plain file that lies in the archive whole. Raises
    ValueError for any other."""
    assert archive.name is not None, "of a file"
    num_bytes = os.stat(archive.name).st_size
    for _ in (MANIFEST, *PARTS):
        member = archive.next()
        if member is None:
            return
        most = num_bytes if member.name == CATALOGUE else min(num_bytes, SMALL_BYTES)
        is_plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()
        if not is_plain or member.size > most:
            raise ValueError(f"{member.name[:60]!r} is no plain file of at most {most:,} bytes")
        yield member


def _rename_parts(file: Path, copy: Path) -> str | None:
    """Give what was unpacked names of its own: by those of the backup it would share, or destroy,
    what others have on a disk or on a server. Return the URL of an index that it no longer has."""
    settings = read_settings(copy)
    if settings is None:
        raise CorpusDamaged(f"{file} has no {SETTINGS}")
    left_index = settings.index if is_remote(settings.index) else None
    index = AUTO if left_index else settings.index
    write_settings(copy, replace(settings, uid=uuid.uuid4().hex[:12], index=index))
    catalogue = Catalogue(copy / CATALOGUE, create=False)
    try:
        catalogue.renew_uid()
        catalogue.uid()  # refuses a catalogue that keeps another
    finally:
        catalogue.close()
    return left_index


def _copy_catalogue(path: Path, to: Path) -> None:
    """Copy it as of one moment, whoever writes meanwhile."""
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)
    _leave_wal(to)


def _leave_wal(path: Path) -> None:
    """Make it one file, without a log beside it."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = DELETE")


@contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    """A folder to work in, on the disk of what is to appear in `parent`; gone at the end. What
    killed processes left there goes first. Raises CorpusError."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{WORK}*"):
            with suppress(OSError), _lock_folder(left):  # else its process is alive
                shutil.rmtree(left)
        with ExitStack() as stack:
            work = Path(mkdtemp(prefix=WORK, dir=parent))
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            with suppress(OSError):  # a disk without locks: what is left there stays
                stack.enter_context(_lock_folder(work))
            yield work
    except OSError as error:
        raise as_corpus_error(error, f"cannot write {parent}", "; name another folder") from error


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which its process loses however it ends. Raises OSError where
    another process has it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
