"""The seams to whoever computes and keeps chunk KV: ingest itself knows no model."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvweave.ingest.report import IngestProgress
from kvweave.types import Chunk, ChunkId


class Encoder(Protocol):
    """Computes and stores the KV of chunks.

    Called on the thread that ingests, after the chunks' vectors are committed, with every chunk of
    the knowledge base in batches, at every ingest: `encode` must skip what its keys say is there,
    quickly. May block. When it raises, ingest stops; what was committed stays, and the next run
    offers the same chunks again.
    """

    def encode(self, chunks: Sequence[Chunk]) -> None: ...


class Upkeep(Protocol):
    """Keeps chunk KV in step with the documents. Called on the thread that ingests, by the writer.

    May block. When it raises, ingest stops; what was committed stays, and the next run calls again.
    """

    def before(self) -> None:
        """Before anything changes: finish what an interrupted run left undone."""
        ...

    def after(
        self, orphaned: Sequence[ChunkId], tell: Callable[[IngestProgress], None] | None = None
    ) -> None:
        """All chunks can be searched and were offered to the encoder; `orphaned` are no more."""
        ...
