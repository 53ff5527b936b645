"""What an ingest tells: while it runs, and when it is done."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvweave.types import ChunkId

Phase = Literal["read", "embed", "index", "encode", "neighbours"]


class Skipped(NamedTuple):
    """A file that did not get in, and why."""

    source: str
    reason: str


class IngestProgress(NamedTuple):
    """How far an ingest is."""

    phase: Phase
    done_bytes: int  # embedded counts, committed or not
    total_bytes: int | None  # None when the sources come from an iterator
    num_documents: int  # looked at so far
    num_chunks: int  # cut so far; in phases "encode" and "neighbours": handled
    source: str  # what is at hand
    total_chunks: int | None = None  # where it is known: in phase "neighbours"


# Called on the ingesting thread, several times a second at most; must not block.
OnProgress = Callable[[IngestProgress], None]


@dataclass(frozen=True, slots=True)
class IngestReport:
    """The outcome. Everything counted here is on the disk."""

    added: int  # documents
    updated: int
    unchanged: int
    removed: int
    new_chunks: int
    shared_chunks: int  # of added and updated documents, already there before
    skipped: tuple[Skipped, ...]
    ignored_files: int  # in folders, of kinds that no parser knows
    orphaned: tuple[ChunkId, ...]  # chunks that no document uses any more: drop their KV
    elapsed_s: float

    @property
    def is_complete(self) -> bool:
        return not self.skipped
