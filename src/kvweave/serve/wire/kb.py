"""Knowledge bases over HTTP: requests and replies."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvweave.app.libraries.libraries import LONGEST_TITLE, KVState, check_metadata
from kvweave.app.libraries.library_browser import section_title, summary_of
from kvweave.errors import RequestError
from kvweave.serve.access.errors import without_paths
from kvweave.serve.wire.base import Incoming, Outgoing, Rounded, Text, at_most, attribute

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


Tenths = Annotated[float, AfterValidator(partial(round, ndigits=1))]


def _without_paths(why: str | None) -> str | None:
    return without_paths(why or "") or None


class CalibrationOut(Outgoing):  # made of an EvidenceState
    """How far documents were asked about themselves: whether a model that nobody calibrated bears
    fusing, or whether less than its calibration lets through is enough here."""

    state: Literal["measuring", "open", "shut"]  # open: answers are fused by what was found
    asked: int  # questions so far
    most: int  # that are asked, unless it ends early
    strategy: str | None  # that may be used so far, at the least ratio; null: none
    ratio: float | None
    why: str  # it is shut, or why no less than before is enough


class KVOut(Outgoing):  # made of a KVProgress
    """How far the chunk KV is that is made in the background."""

    state: KVState
    chunks_done: int
    chunks_total: int
    chunks_in_front: int  # that have a front copy as well
    # of all chunk KV, front copies too: on the disk, where there is one; 0: not known, or none
    bytes: Annotated[int, attribute("num_bytes")]
    eta_s: Tenths | None  # until the rest is there; null: not known, or nothing is made
    hurried: bool  # it is made beside answers, with half of the time
    # what could be done about it
    why: Annotated[str | None, BeforeValidator(_without_paths)] = None
    calibration: CalibrationOut | None = None  # null: the model was calibrated, or nobody asks


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


class DocumentKVOut(Outgoing):  # made of a DocumentKV
    """The chunk KV of a document in the tiers of this machine."""

    state: Literal["ready", "part", "none"]  # of all its chunks, of some, of none
    chunks_done: int
    # by tier; a chunk may have a copy in each
    bytes: Annotated[dict[str, int], attribute("num_bytes")]


class DocumentOut(Outgoing):  # made of a DocumentInfo
    id: str
    source: str
    title: str
    chars: Annotated[int, attribute("num_chars")]
    chunks: Annotated[int, attribute("num_chunks")]
    tokens: Annotated[int, attribute("num_tokens")]
    added_at: float  # seconds since 1970
    metadata: dict[str, str | int | float]  # as it was given
    kv: DocumentKVOut | None = None  # where `limit` was given


class DocumentList(Outgoing):
    object: Literal["list"] = "list"
    data: list[DocumentOut]
    next: str | None = None  # for `after`: there are more


Title = Annotated[str, BeforeValidator(section_title)]  # of a chunk
Length = Annotated[int, BeforeValidator(len)]
Summary = Annotated[str, BeforeValidator(summary_of)]  # of a text


class ChunkLineOut(Outgoing):  # made of a ChunkLine
    """A chunk as a document or a ranking shows it."""

    id: Annotated[str, attribute("chunk", "id")]
    index: Annotated[int, attribute("place")]  # in the document, from 0
    heading: Annotated[Title, attribute("chunk")]
    summary: Annotated[Summary, attribute("chunk", "text")]  # its first sentences
    tokens: Annotated[Length, attribute("chunk", "token_ids")]
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


class HotChunkOut(Outgoing):  # made of a HotChunk
    """A chunk that was in prompts; the other fields as a document has them."""

    id: Annotated[str, attribute("chunk", "id")]
    document: str  # id of one that holds it
    index: Annotated[int, attribute("place")]
    heading: Annotated[Title, attribute("chunk")]
    summary: Annotated[Summary, attribute("chunk", "text")]
    tokens: Annotated[Length, attribute("chunk", "token_ids")]
    asked: int


class HotChunkList(Outgoing):
    object: Literal["list"] = "list"
    data: list[HotChunkOut]  # in most prompts first


class NeighbourOut(Outgoing):  # made of a Hit
    id: Annotated[str, attribute("chunk", "id")]
    document: str | None
    title: Annotated[Title, attribute("chunk")]
    score: float


class ChunkDetail(Outgoing):  # made of a ChunkView
    """All of one chunk."""

    id: Annotated[str, attribute("chunk", "id")]
    document: Annotated[str, attribute("document", "id")]  # one that holds it
    document_title: Annotated[str, attribute("document", "title")]
    title: Annotated[Title, attribute("chunk")]
    index: Annotated[int, attribute("place")]  # in that document, from 0
    text: Annotated[str, attribute("chunk", "text")]
    tokens: Annotated[Length, attribute("chunk", "token_ids")]
    asked: int
    kv: Annotated[dict[str, int], attribute("kv_bytes")]  # by tier
    previous: str | None  # chunk in the document
    next: Annotated[str | None, attribute("following")]
    neighbours: list[NeighbourOut]  # most like it first


class KnowledgeBaseRemoved(Outgoing):
    name: str
    object: Literal["kb.deleted"] = "kb.deleted"
    deleted: Literal[True] = True


class SkippedOut(Outgoing):
    """What did not get in, and why."""

    source: str
    reason: str


class IngestOut(Outgoing):  # made of a IngestReport
    """The outcome of an upload. Everything counted is on the disk."""

    object: Literal["ingest"] = "ingest"
    added: int  # documents
    updated: int
    unchanged: int
    removed: int
    new_chunks: int
    shared_chunks: int  # already there before
    skipped: list[SkippedOut]
    elapsed_s: Rounded
    kv_chunks: int  # whose KV was made before this reply: none unless it was waited for
    kv_bytes: int


class ProgressOut(Outgoing):  # made of a IngestProgress
    """An event while an upload is taken in; the last event is the outcome."""

    object: Literal["ingest.progress"] = "ingest.progress"
    phase: str  # read, embed, index, encode or neighbours
    done_bytes: int
    total_bytes: int | None
    documents: Annotated[int, attribute("num_documents")]  # looked at so far
    # cut so far; in phases encode and neighbours: with KV
    chunks: Annotated[int, attribute("num_chunks")]
    total_chunks: int | None  # in those phases
    kv_bytes: int  # written so far
    eta_s: Tenths | None  # until the end of the phase; null: not known


class RemovedOut(Outgoing):
    id: str
    object: Literal["document.deleted"] = "document.deleted"
    deleted: Literal[True] = True
    chunks: int  # that went with it, chunk KV and all


def _fate(tier: str | None) -> str:
    return "computed" if tier is None else "reused"


class HitOut(Outgoing):  # made of a SearchHit
    id: Annotated[str, attribute("hit", "chunk", "id")]  # of the chunk
    document: Annotated[str | None, attribute("hit", "document")]  # id of one that holds it
    title: Annotated[Title, attribute("hit", "chunk")]
    text: Annotated[str, attribute("hit", "chunk", "text")]
    tokens: Annotated[Length, attribute("hit", "chunk", "token_ids")]
    score: Annotated[float, attribute("hit", "score")]
    chars: tuple[int, int] | None  # of its document that it covers, [start, end)
    tier: str | None  # that has its KV now; null: none has
    # of its KV, if it stood in a prompt now
    fate: Annotated[Literal["reused", "computed"], attribute("tier"), BeforeValidator(_fate)]


class HitList(Outgoing):
    object: Literal["list"] = "list"
    data: list[HitOut]


class JobOut(Outgoing):  # made of a UploadJob
    """How far a job is."""

    id: str
    object: Literal["ingest.job"] = "ingest.job"
    kb: str
    state: Literal["waiting", "running", "done", "failed", "cancelled"]
    created: Rounded  # seconds since 1970
    ended: Rounded | None  # null: it is not over
    progress: ProgressOut | None  # null: it has not begun
    report: IngestOut | None  # the outcome, once it is done
    error: str | None  # why it failed


class JobList(Outgoing):
    object: Literal["list"] = "list"
    data: list[JobOut]  # newest first
