"""The seam to whoever computes chunk KV: ingest sits left of the engine and knows no model."""

from collections.abc import Sequence
from typing import Protocol

from kvweave.types import Chunk


class Encoder(Protocol):
    """Computes and stores the KV of chunks.

    Called on the thread that ingests, after the chunks' vectors are committed, with every chunk of
    the knowledge base in batches, at every ingest: `encode` must skip what its keys say is there,
    quickly. May block. When it raises, ingest stops; what was committed stays, and the next run
    offers the same chunks again.
    """

    def encode(self, chunks: Sequence[Chunk]) -> None: ...
