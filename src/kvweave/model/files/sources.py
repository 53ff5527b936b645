"""Where the one file of an embedded model can be had, and getting it from the first that has it.

Every source of a model gives the same bytes, and the sha256 of the whole decides. What has come
from a source and was checked lies in its own folder, which an interruption leaves alone: the next
pull goes on there.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kvweave.errors import ModelCorrupt, ModelNotFound
from kvweave.model.files.model_cache import Progress, PullStep
from kvweave.model.files.wheel import check_sha256, sha256_of


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
