"""The nouns that several folders share. Data only: no logic, no globals, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

DocumentId = NewType("DocumentId", str)  # hex; names a place (a file, a record in it), not content
ChunkId = NewType("ChunkId", str)  # hex; a hash of the chunk's token ids and nothing else


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit of retrieval and of KV reuse. Equal ids mean equal tokens, wherever they stand."""

    id: ChunkId
    title: str  # the line in front of the text; "" when there is none
    text: str  # what the model reads, title line included
    token_ids: tuple[int, ...]  # tokens of `text` by itself: these stand in the prompt, unchanged


class PlacedChunk(NamedTuple):
    """A chunk and the characters of its document that it covers, [start, end)."""

    chunk: Chunk
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ParsedDocument:
    """One text as a parser found it, before it is cut."""

    id: DocumentId
    source: str  # a resolved path, or "text:…" for text handed over from Python
    title: str
    text: str
    metadata: Mapping[str, str | int | float] = field(default_factory=dict)  # its owner's


class Hit(NamedTuple):
    """A chunk found by a search. Scores compare within one search, not across kinds of search."""

    chunk: Chunk
    score: float
    document: DocumentId | None = None  # that holds it; of several the first by id


class EncodeWork(NamedTuple):
    """How much KV is to be computed, or was."""

    num_chunks: int = 0
    num_tokens: int = 0
    num_bytes: int = 0

    def plus(self, other: "EncodeWork") -> "EncodeWork":
        return EncodeWork(*(a + b for a, b in zip(self, other, strict=True)))
