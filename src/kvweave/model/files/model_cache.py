"""The model cache: a folder below the user's cache folder that holds converted models.

    models/smollm2-0.1.2/         a model folder plus manifest.json; whole, or not there at all
    models/.making-<name>-…/      work in progress; stale unless a process holds the lock
    models/.downloads/<name>/     what was downloaded and checked so far; the next pull goes on here
    models/.locks/<name>.lock     held while <name> is made or removed

A folder is made aside and renamed into place, so a kill at any moment leaves nothing that counts
as present. The lock is the kernel's and dies with its owner; the next process that gets it
removes what is left.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kvweave.errors import ModelError
from kvweave.paths import home

stages = logging.getLogger("kvweave.stages")  # what a server does before it is ready

_MANIFEST = "manifest.json"


class PullStep(NamedTuple):
    """How far a pull has come. `total_bytes` is 0 where it is not known."""

    what: str  # "downloading", "converting", …
    done_bytes: int
    total_bytes: int
    done_parts: int = 0  # of a download in parts
    num_parts: int = 0  # 0: it has none


Progress = Callable[[PullStep], None]


def no_progress(step: PullStep) -> None:
    """For callers that show none."""


def tell_stages(name: str, progress: Progress | None) -> Progress:
    """Return a progress that tells `progress` and a starting server of every step."""

    def tell(step: PullStep) -> None:
        share = step.done_bytes / step.total_bytes if step.total_bytes else None
        stages.info("%s %s", step.what, name, extra={"share": share})
        if progress is not None:
            progress(step)

    return tell


@dataclass(frozen=True, slots=True)
class CacheOrigin:
    """What a folder was made from."""

    name: str  # what the user calls it
    what: str  # one phrase for people
    source: str  # the wheel or file it came out of
    licence: str
    sha256: str  # of the source
    converter: int  # version of our conversion
    generation: dict[str, Any] = field(default_factory=dict)  # added to generation_config.json

    def gives_the_same_as(self, other: "CacheOrigin") -> bool:
        """Whether both give the same bytes, whatever people call them."""
        mine, others = ((o.sha256, o.converter, o.generation) for o in (self, other))
        return mine == others


class CachedModel(NamedTuple):
    """A folder that is present and complete."""

    path: Path
    origin: CacheOrigin
    made: str  # ISO date
    size_bytes: int


class ModelCache:
    """Creates nothing on disk until a model is made. Safe for many threads and processes."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = home() / "models" if root is None else root

    def peek(self, folder_name: str, origin: CacheOrigin | None = None) -> CachedModel | None:
        """The folder if it is whole: every file has the length it had when made.

        With `origin`, only a folder made from the same bytes counts.
        """
        path = self.root / folder_name
        try:
            manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
            files: dict[str, int] = manifest["files"]
            if any((path / name).stat().st_size != size for name, size in files.items()):
                return None
            found = CacheOrigin(**manifest["origin"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # absent, or not ours, or damaged: in each case it has to be made again
        if origin is not None and not found.gives_the_same_as(origin):
            return None
        return CachedModel(path, found, str(manifest.get("made", "")), sum(files.values()))

    def list(self) -> "list[CachedModel]":
        if not self.root.is_dir():
            return []
        names = sorted(p.name for p in self.root.iterdir() if not p.name.startswith("."))
        return [cached for name in names if (cached := self.peek(name)) is not None]

    def make(
        self,
        folder_name: str,
        origin: CacheOrigin,
        fill: Callable[[Path, Path], None],
        progress: Progress,
    ) -> Path:
        """Return the folder, made by `fill(folder, scratch)` unless it is there already.

        `fill` creates `folder` and may litter `scratch`. Blocks while another process makes the
        same folder, then returns that one's work.
        """
        with self._explain_disk(origin.name), self._lock(folder_name, progress):
            found = self.peek(folder_name, origin)
            if found is not None:
                return found.path
            with self._scratch(folder_name) as scratch:
                folder = scratch / "folder"
                fill(folder, scratch)
                _seal(folder, origin)
                made = self._put(folder, folder_name, scratch)
            downloads = self.downloads(folder_name)
            shutil.rmtree(downloads, ignore_errors=True)
            with suppress(OSError):  # others download there
                downloads.parent.rmdir()
            return made

    def downloads(self, folder_name: str) -> Path:
        """The folder for what was downloaded of a model that is not whole yet. Use it inside `fill`
        alone: the lock is held there."""
        return self.root / ".downloads" / folder_name

    def remove(self, folder_name: str) -> bool:
        """Delete a folder, or what is left or was downloaded of one. False: there was nothing."""
        paths = [self.root / folder_name, self.downloads(folder_name)]
        if not any(path.is_dir() for path in paths):
            return False
        with self._explain_disk(folder_name), self._lock(folder_name, no_progress):
            there = [path for path in paths if path.is_dir()]  # another rm may have been quicker
            with self._scratch(folder_name) as scratch:
                for number, path in enumerate(there):
                    # out of sight first: a kill while deleting must not leave half a model
                    path.rename(scratch / f"removed{number}")
        return bool(there)

    def _put(self, folder: Path, folder_name: str, scratch: Path) -> Path:
        final = self.root / folder_name
        if final.exists():  # damaged, or from an older converter
            final.rename(scratch / "replaced")
        folder.rename(final)
        return final

    @contextmanager
    def _explain_disk(self, name: str) -> Iterator[None]:
        """A full or read-only disk is one line with a way out."""
        try:
            yield
        except OSError as error:
            raise ModelError(
                f"{name}: cannot change {self.root}: {error.strerror or error}; "
                "make room there or point KVWEAVE_HOME elsewhere"
            ) from error

    @contextmanager
    def _lock(self, folder_name: str, progress: Progress) -> Iterator[None]:
        from filelock import FileLock, Timeout

        locks = self.root / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{folder_name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            progress(PullStep("waiting for another kvweave's", 0, 0))
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _scratch(self, folder_name: str) -> Iterator[Path]:
        """A folder on the same disk, gone afterwards. Call with the lock held."""
        prefix = f".making-{folder_name}-"
        for stale in self.root.glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)  # its owner is dead: we have the lock
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=self.root))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # what stays behind goes next time


def _seal(folder: Path, origin: CacheOrigin) -> None:
    """Write the manifest, last of all, and see everything onto the disk."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    manifest: dict[str, Any] = {
        "origin": asdict(origin),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {p.relative_to(folder).as_posix(): p.stat().st_size for p in files},
    }
    path = folder / _MANIFEST
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for file in [*files, path]:
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())


def link_or_copy(source: Path, target: Path) -> Path:
    """Put the bytes of `source` at `target`, as a link where the disk can do that."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
    return target
