"""One writer per knowledge base, over all processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvweave.errors import CorpusError

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
