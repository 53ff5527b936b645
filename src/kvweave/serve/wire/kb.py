"""Knowledge bases over HTTP: requests and replies, and replies made of what `app` gives."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvweave.app.libraries.libraries import (
    LONGEST_TITLE,
    IngestProgress,
    IngestReport,
    KVProgress,
    check_metadata,
)
from kvweave.errors import RequestError
from kvweave.serve.errors import without_paths
from kvweave.serve.wire.base import Incoming, Outgoing, Text, at_most

OrderName = Literal["as_found", "free", "auto"]


def _metadata(value: Any) -> Any:
    """Judged by the room that keeps it, in its words."""
    if not isinstance(value, dict):
        raise PydanticCustomError("metadata", "must be an object of texts and numbers")
    try:
        return check_metadata(value)
    except RequestError as error:
        raise PydanticCustomError("metadata", "{why}", {"why": str(error)}) from None


MetadataIn = Annotated[
    dict[str, Any],
    BeforeValidator(_metadata, json_schema_input_type=dict[str, str | int | float]),
]


ShortText = Annotated[Text, BeforeValidator(at_most(LONGEST_TITLE, "characters", str))]


class TextIn(Incoming):
    """The JSON body of POST /v1/kb/{name}/documents."""

    text: Text
    title: ShortText = ""
    # the same key later means an update; left out: the content is the key
    key: ShortText | None = None
    metadata: MetadataIn = Field(default_factory=dict)  # texts and numbers that filters ask for


class SearchRequest(Incoming):
    """The body of POST /v1/kb/{name}/search."""

    query: Text
    k: int = 5
    retrieval: Literal["vector", "words", "hybrid"] | None = None  # left out: as configured
    min_score: float | None = None  # of a chunk that counts; left out: as configured
    filter: dict[str, Any] = Field(default_factory=dict)  # what metadata its document has


class KVOut(Outgoing):
    """How far the chunk KV is that is made in the background."""

    state: Literal["off", "making", "ready", "full", "failed", "unused"]
    chunks_done: int
    chunks_total: int
    chunks_in_front: int  # that have a front copy as well
    bytes: int
    eta_s: float | None  # until the rest is there; null: not known, or nothing is made
    why: str | None = None  # nothing more can be made


class KnowledgeBaseOut(Outgoing):
    name: str
    documents: int
    chunks: int
    tokens: int  # of distinct chunks
    models: list[str]  # it is listed with, the usual one first; none: it is of another tokenizer
    kv: KVOut
    problem: str | None = None  # it cannot be used: what is wrong; its counts are 0 then
    # whether chunks may move in the prompts of questions that do not say it; None: as configured
    order: str | None = None


class KnowledgeBaseChange(Incoming):
    """What may be changed of a knowledge base."""

    order: OrderName | Literal["configured"]


class KnowledgeBaseList(Outgoing):
    object: Literal["list"] = "list"
    data: list[KnowledgeBaseOut]
    next: str | None = None  # for `after`: there are more


class DocumentKVOut(Outgoing):
    """The chunk KV of a document in the tiers of this machine."""

    state: Literal["ready", "part", "none"]  # of all its chunks, of some, of none
    chunks_done: int
    bytes: dict[str, int]  # by tier; a chunk may have a copy in each


class DocumentOut(Outgoing):
    id: str
    source: str
    title: str
    chars: int
    chunks: int
    tokens: int
    added_at: float  # seconds since 1970
    metadata: dict[str, str | int | float]  # as it was given
    kv: DocumentKVOut | None = None  # where `limit` was given


class DocumentList(Outgoing):
    object: Literal["list"] = "list"
    data: list[DocumentOut]
    next: str | None = None  # for `after`: there are more


class ChunkLineOut(Outgoing):
    """A chunk as a document or a ranking shows it."""

    id: str
    index: int  # its place in the document, from 0
    heading: str
    tokens: int
    asked: int  # prompts it was in since the server began


class DocumentDetail(Outgoing):
    """One document with its chunks; the other fields as a list has them."""

    id: str
    source: str
    title: str
    chars: int
    chunks: int
    tokens: int
    added_at: float
    metadata: dict[str, str | int | float]
    kv: DocumentKVOut
    pieces: list[ChunkLineOut]  # in order


class HotChunkOut(Outgoing):
    """A chunk that was in prompts; the other fields as a document has them."""

    id: str
    document: str  # id of one that holds it
    index: int
    heading: str
    tokens: int
    asked: int


class HotChunkList(Outgoing):
    object: Literal["list"] = "list"
    data: list[HotChunkOut]  # in most prompts first


class NeighbourOut(Outgoing):
    id: str
    document: str | None
    title: str
    score: float


class ChunkDetail(Outgoing):
    """All of one chunk."""

    id: str
    document: str  # id of one that holds it
    document_title: str
    title: str
    index: int  # its place in that document, from 0
    text: str
    tokens: int
    asked: int
    kv: dict[str, int]  # bytes by tier
    previous: str | None  # chunk in the document
    next: str | None
    neighbours: list[NeighbourOut]  # most like it first


class KnowledgeBaseRemoved(Outgoing):
    name: str
    object: Literal["kb.deleted"] = "kb.deleted"
    deleted: Literal[True] = True


class SkippedOut(Outgoing):
    """What did not get in, and why."""

    source: str
    reason: str


class IngestOut(Outgoing):
    """The outcome of an upload. Everything counted is on the disk."""

    object: Literal["ingest"] = "ingest"
    added: int  # documents
    updated: int
    unchanged: int
    removed: int
    new_chunks: int
    shared_chunks: int  # already there before
    skipped: list[SkippedOut]
    elapsed_s: float
    kv_chunks: int  # whose KV was made before this reply: none unless it was waited for
    kv_bytes: int


class ProgressOut(Outgoing):
    """An event while an upload is taken in; the last event is the outcome."""

    object: Literal["ingest.progress"] = "ingest.progress"
    phase: str  # read, embed, index, encode or neighbours
    done_bytes: int
    total_bytes: int | None
    documents: int  # looked at so far
    chunks: int  # cut so far; in phases encode and neighbours: with KV
    total_chunks: int | None  # in those phases
    kv_bytes: int  # written so far
    eta_s: float | None  # until the end of the phase; null: not known


class RemovedOut(Outgoing):
    id: str
    object: Literal["document.deleted"] = "document.deleted"
    deleted: Literal[True] = True
    chunks: int  # that went with it, chunk KV and all


class HitOut(Outgoing):
    id: str  # of the chunk
    document: str | None  # id of one that holds it
    title: str
    text: str
    tokens: int
    score: float
    chars: tuple[int, int] | None  # of its document that it covers, [start, end)
    tier: str | None  # that has its KV now; null: none has
    fate: Literal["reused", "computed"]  # of its KV, if it stood in a prompt now


class HitList(Outgoing):
    object: Literal["list"] = "list"
    data: list[HitOut]


def report_out(report: IngestReport) -> IngestOut:
    """An IngestReport in the wire format."""
    return IngestOut(
        added=report.added,
        updated=report.updated,
        unchanged=report.unchanged,
        removed=report.removed,
        new_chunks=report.new_chunks,
        shared_chunks=report.shared_chunks,
        skipped=[SkippedOut(source=s.source, reason=s.reason) for s in report.skipped],
        elapsed_s=round(report.elapsed_s, 3),
        kv_chunks=report.kv_chunks,
        kv_bytes=report.kv_bytes,
    )


def kv_out(progress: KVProgress) -> KVOut:
    """How far chunk KV is, in the wire format."""
    return KVOut(
        state=progress.state,
        chunks_done=progress.chunks_done,
        chunks_total=progress.chunks_total,
        chunks_in_front=progress.chunks_in_front,
        bytes=progress.num_bytes,
        eta_s=None if progress.eta_s is None else round(progress.eta_s, 1),
        why=without_paths(progress.why) or None,
    )


def progress_out(progress: IngestProgress) -> ProgressOut:
    """What is known of an ingest under way, in the wire format."""
    return ProgressOut(
        phase=progress.phase,
        done_bytes=progress.done_bytes,
        total_bytes=progress.total_bytes,
        documents=progress.num_documents,
        chunks=progress.num_chunks,
        total_chunks=progress.total_chunks,
        kv_bytes=progress.kv_bytes,
        eta_s=None if progress.eta_s is None else round(progress.eta_s, 1),
    )
