"""The folder of a knowledge base: how it is made, and the lock of its one writer."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.corpus.chunker import Chunker
from kvweave.corpus.embedder import Embedder
from kvweave.corpus.index import AUTO, check_kind
from kvweave.corpus.settings import (
    CHUNK_TOKENS,
    FILE,
    KnowledgeBaseSettings,
    read_settings,
    write_settings,
)
from kvweave.errors import CorpusError

if TYPE_CHECKING:
    from kvweave.text.tokenizer import Tokenizer

LOCK = "writer.lock"


@contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Be the writer of the knowledge base in `folder`, or CorpusError at once.

    The operating system drops the lock when its holder dies, however it dies.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise CorpusError(
            f"{folder} is being written by another process; wait for it and run this again"
        ) from error
    except OSError as error:
        raise CorpusError(
            f"cannot write {folder}: {error.strerror}; make the folder writable"
        ) from error
    try:
        yield
    finally:
        lock.release()


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
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"cannot make {folder}: {error.strerror}; name another folder") from error
    with writer_lock(folder):
        there = read_settings(folder)  # another process may have been first
        if there is not None:
            return there
        write_settings(folder, settings)
    return settings


def _is_ours(path: Path) -> bool:
    """What other processes that make it just now have there, or left when they were killed."""
    return path.name == LOCK or (path.name.startswith(f"{FILE}.") and path.suffix == ".tmp")
