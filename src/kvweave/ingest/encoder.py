"""The seams to what computes and keeps chunk KV: ingest itself knows no model."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvweave.ingest.report import IngestProgress
from kvweave.types import Chunk, ChunkId, EncodeWork


class Encoder(Protocol):
    """Computes and stores the KV of chunks.

    Called on the thread that ingests, after the chunks' vectors are committed, in batches: with the
    chunks that are new where `ChunkKVSync.is_encoded` vouches for the others, else with every chunk
    of the knowledge base. It must skip what its keys say is there, quickly. May block. When
    it raises, ingest stops; what was committed stays, and the next run offers the same ones again.
    """

    def missing(self, chunks: Sequence[Chunk]) -> EncodeWork:
        """What `encode` would compute of these."""
        ...

    def encode(
        self, chunks: Sequence[Chunk], tell: Callable[[EncodeWork], None] | None = None
    ) -> None:
        """`tell` hears what was computed, as often as some was."""
        ...


class ChunkKVSync(Protocol):
    """Keeps chunk KV in step with the documents. Called on the thread that ingests, by the writer.

    May block. When it raises, ingest stops; what was committed stays, and the next run calls again.
    """

    def before(self) -> None:
        """Before anything changes: finish what an interrupted run left undone."""
        ...

    def is_encoded(self) -> bool:
        """After `before`: every chunk that is there now was offered to the encoder earlier, so that
        only those that come need be. False: that is not known, or all are to be looked at."""
        ...

    def after(
        self,
        orphaned: Sequence[ChunkId],
        tell: Callable[[IngestProgress], None] | None = None,
        new: Sequence[ChunkId] | None = None,
    ) -> None:
        """All chunks can be searched and were offered to the encoder; `orphaned` are no more.
        `new` are those that came, where only they were offered; None: all were."""
        ...
