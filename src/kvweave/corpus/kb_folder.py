"""The folder of a knowledge base: how it is made, and the lock of its one writer."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.corpus.catalogue import Catalogue
from kvweave.corpus.chunker import Chunker
from kvweave.corpus.disk_files import as_corpus_error, make_folder
from kvweave.corpus.embedder import OLD_IDENTITY, Embedder
from kvweave.corpus.index import AUTO, check_kind
from kvweave.corpus.settings import (
    CHUNK_TOKENS,
    FILE,
    KnowledgeBaseSettings,
    read_settings,
    write_settings,
)
from kvweave.errors import CorpusBusy, CorpusDamaged, CorpusError
from kvweave.paths import sync

if TYPE_CHECKING:
    from filelock import FileLock

    from kvweave.text.tokenizer import Tokenizer

CATALOGUE = "catalogue.sqlite"
LOCK = "writer.lock"
BRIEF = "brief.lock"  # held as well by a writer that is soon done
DOOMED = ".deleted-"  # begins the name of a folder that is on its way out
BRIEF_S = 30.0  # that others wait for such a one
COMPARED_CHUNKS = 4  # embedded again, where an old identity cannot say whether the embedder fits
# Vectors of one model in 8 bits and in float32 have a cosine of 0.9975 at least (docs/cpu.md)
SAME_COSINE = 0.99


@contextmanager
def writer_lock(folder: Path, *, briefly: bool = False) -> Iterator[None]:
    """Be the writer of the knowledge base in `folder`, or CorpusError at once.

    One who writes `briefly` says so, and others then wait for it. The operating system drops the
    lock when its holder dies, however it dies.
    """
    from filelock import FileLock, Timeout

    lock, brief = FileLock(folder / LOCK, timeout=0), FileLock(folder / BRIEF, timeout=0)
    try:
        if briefly:
            brief.acquire()
        _acquire(lock, brief, briefly)
    except Timeout as error:
        brief.release()
        raise CorpusBusy(
            f"{folder} is being written by another process; wait for it and run this again"
        ) from error
    except OSError as error:
        brief.release()
        raise as_corpus_error(error, f"cannot write {folder}", "; make it writable") from error
    try:
        yield
    finally:
        lock.release()
        brief.release()


def _acquire(lock: "FileLock", brief: "FileLock", briefly: bool) -> None:
    """At once; or soon, behind a writer that is soon done. Raises Timeout."""
    from filelock import Timeout

    try:
        lock.acquire()
    except Timeout:
        if briefly:
            raise
        is_brief = False
        try:
            brief.acquire()
            brief.release()
        except Timeout:
            is_brief = True
        lock.acquire(timeout=BRIEF_S if is_brief else 0)  # it may just have ended


def create_folder(
    folder: Path,
    tokenizer: "Tokenizer",
    embedder: Embedder,
    chunk_tokens: int | None,
    index: str | None,
) -> KnowledgeBaseSettings:
    """The settings of the new knowledge base in `folder`, or of the one that another process made
    there just now: the caller checks that they fit. None is the default. Nothing is written before
    all of it is known to fit. Raises CorpusError or ConfigError."""
    if folder.exists() and not (folder.is_dir() and all(map(_is_ours, folder.iterdir()))):
        raise CorpusError(
            f"{folder} exists and is no knowledge base (it has no {FILE}); name a new folder"
        )
    settings = KnowledgeBaseSettings(
        tokenizer=tokenizer.fingerprint,
        embedder=embedder.name,
        embedder_identity=embedder.identity,
        dim=embedder.dim,
        chunk_tokens=CHUNK_TOKENS if chunk_tokens is None else chunk_tokens,
        index=AUTO if index is None else check_kind(index),
        uid=uuid.uuid4().hex[:12],
    )
    Chunker(tokenizer, settings.chunk_tokens)  # refuses a bad size before anything is written
    try:
        make_folder(folder)
    except OSError as error:
        raise as_corpus_error(error, f"cannot make {folder}", "; name another folder") from error
    with writer_lock(folder):
        there = read_settings(folder)  # another process may have been first
        if there is not None:
            return there
        _make_catalogue(folder)  # first: where there are settings and no catalogue, it was lost
        write_settings(folder, settings)
    return settings


def renew_identity(
    folder: Path, settings: KnowledgeBaseSettings, embedder: Embedder
) -> KnowledgeBaseSettings:
    """Return the settings with the identity of `embedder` in place of one that an older kvweave
    wrote, if it is the same embedder: it has the same name and gives the stored vectors again.
    Identities of then held the time of download, so they cannot be compared."""
    identity = embedder.identity
    is_old = OLD_IDENTITY.fullmatch(settings.embedder_identity) is not None
    names = {Path(name).name.lower() for name in (settings.embedder, embedder.name)}
    if not is_old or identity == settings.embedder_identity or len(names) > 1:
        return settings
    if settings.dim != embedder.dim or not _has_vectors_of(embedder, folder, settings.dim):
        return settings
    # what cannot be written is compared the next time, too
    with suppress(CorpusError, OSError), writer_lock(folder, briefly=True):
        settings = replace(read_settings(folder) or settings, embedder_identity=identity)
        write_settings(folder, settings)
    return replace(settings, embedder_identity=identity)


def _has_vectors_of(embedder: Embedder, folder: Path, dim: int) -> bool:
    """Whether the embedder gives the vectors of the first chunks again; True where none is."""
    catalogue = Catalogue(folder / CATALOGUE, create=False)
    try:
        chunks = [chunk for _, chunk in catalogue.chunks_after(0, COMPARED_CHUNKS)]
        stored = catalogue.vectors_of_chunks([chunk.id for chunk in chunks], dim)
    finally:
        catalogue.close()
    if not chunks:
        return True
    found = embedder.embed_passages([chunk.text for chunk in chunks])
    return all(
        float(vector @ stored[chunk.id]) >= SAME_COSINE
        for chunk, vector in zip(chunks, found, strict=True)
    )


def _make_catalogue(folder: Path) -> None:
    """An empty one, or the one that a process left which was killed here. Raises CorpusDamaged for
    one with documents: its settings were lost, and others would not fit."""
    catalogue = Catalogue(folder / CATALOGUE)
    try:
        num_documents = catalogue.totals().num_documents
    finally:
        catalogue.close()
    sync(folder)  # its name: settings that a power cut leaves alone would tell of a lost catalogue
    if num_documents:
        raise CorpusDamaged(
            f"{folder} has {num_documents} documents and lost its {FILE}; restore it (kvweave kb "
            "restore), or name a new folder"
        )


def remove_folder(folder: Path) -> None:
    """Delete the folder of a knowledge base that nobody has open, with whatever lies in it. It is
    renamed first: killed in between, there is no half of it under its name, and the next deletion
    beside it takes the rest. Raises CorpusError."""
    for each in folder.parent.glob(f"{DOOMED}*"):
        shutil.rmtree(each, ignore_errors=True)  # perhaps another deletion is at it just now
    try:
        with writer_lock(folder):
            doomed = folder.with_name(f"{DOOMED}{folder.name}-{uuid.uuid4().hex[:8]}")
            folder.rename(doomed)
            sync(folder.parent)  # or a power cut could leave its name with half of its files
        shutil.rmtree(doomed)
    except OSError as error:
        raise CorpusError(
            f"cannot delete {folder.name}: {error.strerror}; make its folder writable"
        ) from error


def _is_ours(path: Path) -> bool:
    """What other processes that make it just now have there, or left when they were killed."""
    catalogue = (f"{CATALOGUE}{end}" for end in ("", "-journal", "-wal", "-shm"))
    return path.name in (LOCK, BRIEF, *catalogue) or (
        path.name.startswith(f"{FILE}.") and path.suffix == ".tmp"
    )
