"""What an answer was given to answer from, chunk by chunk, and what became of each."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from kvweave.corpus.chunker import make_chunk_id, section_title
from kvweave.fuse.record import ChunkRecord, FuseRecord
from kvweave.text.prompt import Document, Prompt, chunk_text
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import ChunkId, DocumentId, Hit

COMPUTED = "computed"


class RetrievedChunk(NamedTuple):
    """A chunk that was found for a question, or that its caller brought."""

    token_ids: tuple[int, ...]
    title: str
    text: str  # as it stands in the prompt
    id: ChunkId | None = None  # where it is known; `make_chunk_id` names any
    score: float | None = None  # of the search; None: brought
    document: DocumentId | None = None  # of the knowledge base; None: brought

    @classmethod
    def found(cls, hit: Hit) -> "RetrievedChunk":
        chunk = hit.chunk
        title = section_title(chunk)
        return cls(chunk.token_ids, title, chunk.text, chunk.id, hit.score, hit.document)

    @classmethod
    def brought(cls, document: Document, tokenizer: Tokenizer) -> "RetrievedChunk":
        text = chunk_text(document)
        return cls(tuple(tokenizer.encode_text(text)), document.title.strip(), text)


@dataclass(frozen=True, slots=True)
class AnswerSource:
    """One of the chunks that an answer was made from."""

    cited_as: int  # from 1, in the order that the search gave, or the caller
    document: DocumentId | None  # None: the caller brought it
    title: str
    chunk: ChunkId
    score: float | None  # of the search; None: the caller brought it
    # its tokens in the prompt, [start, end); None: the prompt was tokenised elsewhere
    span: tuple[int, int] | None
    tier: str | None  # where its KV came from; None: it was computed, or elsewhere
    # exact, reused (some of it may be recomputed) or computed; None: an upstream knows
    fate: str | None

    def as_json(self) -> dict[str, Any]:
        """For JSON."""
        score = None if self.score is None else round(self.score, 6)
        span = None if self.span is None else list(self.span)
        return {**asdict(self), "span": span, "score": score}


def sources_of(
    retrieved: Sequence[RetrievedChunk], prompt: Prompt, record: FuseRecord | None
) -> tuple[AnswerSource, ...]:
    """Where the chunks of a question stand in its prompt, those that the history holds too, and how
    `record` says they were prefilled (None: computed)."""
    parts = (*prompt.history, *prompt.chunks)
    starts = accumulate((len(ids) for ids in parts), initial=len(prompt.preamble))
    places: dict[tuple[int, ...], list[int]] = {}
    for ids, start in zip(parts, starts, strict=False):  # one start more: where the question begins
        places.setdefault(ids, []).append(start)
    records = {} if record is None else {chunk.start: chunk for chunk in record.chunks}
    sources = []
    for number, chunk in enumerate(retrieved, 1):
        free = places.get(chunk.token_ids, [])
        assert free, "every chunk that was retrieved is in the prompt"
        start = free.pop(0) if len(free) > 1 else free[0]  # brought twice, it stands there twice
        sources.append(_source(number, chunk, start, records.get(start)))
    return tuple(sources)


def routed_sources(
    retrieved: Sequence[RetrievedChunk], spans: Mapping[ChunkId, tuple[int, int]]
) -> tuple[AnswerSource, ...]:
    """Of an answer that is computed elsewhere, given where its chunks stand, as far as that is
    known. What becomes of each is not."""
    sources = []
    for number, chunk in enumerate(retrieved, 1):
        name = chunk.id or make_chunk_id(chunk.token_ids)
        sources.append(
            AnswerSource(
                cited_as=number,
                document=chunk.document,
                title=chunk.title,
                chunk=name,
                score=chunk.score,
                span=spans.get(name),
                tier=None,
                fate=None,
            )
        )
    return tuple(sources)


def _source(
    number: int, chunk: RetrievedChunk, start: int, record: ChunkRecord | None
) -> AnswerSource:
    return AnswerSource(
        cited_as=number,
        document=chunk.document,
        title=chunk.title,
        chunk=chunk.id or make_chunk_id(chunk.token_ids),
        score=chunk.score,
        span=(start, start + len(chunk.token_ids)),
        tier=None if record is None else record.tier,
        fate=COMPUTED if record is None else str(record.state),
    )
