"""Looks around in one knowledge base: its documents, their chunks, and the KV there is of them."""

from typing import Literal, NamedTuple

from kvweave.app.answer.settings import ChunkUses
from kvweave.app.hosts import LibraryHost
from kvweave.corpus.catalogue import DocumentInfo as DocumentInfo
from kvweave.corpus.chunker import section_title as section_title  # for those who show chunks
from kvweave.corpus.chunker import summary_of as summary_of
from kvweave.corpus.search import SearchOptions
from kvweave.errors import CorpusError
from kvweave.types import Chunk, ChunkId, DocumentId, Hit

NEIGHBOURS = 5  # most like a chunk


class NotInLibrary(CorpusError):
    """The knowledge base has no such document or chunk."""


class DocumentKV(NamedTuple):
    """The chunk KV of one document in the tiers of this machine."""

    state: Literal["ready", "part", "none"]  # of all its chunks, of some, of none
    chunks_done: int
    num_bytes: dict[str, int]  # by tier; a chunk may have a copy in each


class DocumentLine(NamedTuple):
    """A document as a list shows it."""

    info: DocumentInfo
    kv: DocumentKV


class ChunkLine(NamedTuple):
    """A chunk as a document shows it."""

    chunk: Chunk
    place: int  # in the document, from 0
    asked: int  # prompts it was in


class HotChunk(NamedTuple):
    """A chunk that was in prompts, where a document holds it: of several the first by id."""

    chunk: Chunk
    place: int
    asked: int
    document: DocumentId


class ChunkView(NamedTuple):
    """All of one chunk."""

    chunk: Chunk
    document: DocumentInfo
    place: int  # in that document, from 0
    asked: int  # prompts it was in
    kv_bytes: dict[str, int]  # by tier
    previous: ChunkId | None  # in the document
    following: ChunkId | None
    neighbours: list[Hit]  # the chunks most like it, nearest first


class SearchHit(NamedTuple):
    """A chunk that was found, and what is known of it."""

    hit: Hit
    chars: tuple[int, int] | None  # that it covers in its document, [start, end)
    tier: str | None  # that has its KV now; None: none has


class LibraryBrowser:
    """For one thread at a time, while its knowledge base is open."""

    def __init__(self, host: LibraryHost, uses: ChunkUses) -> None:
        self._kb = host.kb
        self._library = host.engines[0].library if host.engines else None
        self._catalogue = host.kb.catalogue
        self._uses = uses

    def documents(self, after: str | None, limit: int | None) -> list[DocumentInfo]:
        """At most `limit` documents behind the one called `after`, by source and age."""
        if after is None:
            return self._catalogue.documents(limit=limit)
        return self._catalogue.documents(self._info(after).id, limit)

    def kv(self, document: DocumentInfo) -> DocumentKV:
        """The KV there is of a document. Looks at each of its chunks."""
        placed = self._catalogue.document_chunks(document.id)
        of_each = [self._kv_bytes(place.chunk) for place in placed]
        done = sum(bool(sizes) for sizes in of_each)
        total: dict[str, int] = {}
        for sizes in of_each:
            for tier, size in sizes.items():
                total[tier] = total.get(tier, 0) + size
        state: Literal["ready", "part", "none"] = "part" if done else "none"
        return DocumentKV("ready" if placed and done == len(placed) else state, done, total)

    def document(self, document_id: str) -> tuple[DocumentLine, list[ChunkLine]]:
        """A document and its chunks, in order. Raises NotInLibrary."""
        info = self._info(document_id)
        chunks = [
            ChunkLine(chunk, place, self._uses.count(chunk.id))
            for place, (chunk, _, _) in enumerate(self._catalogue.document_chunks(info.id))
        ]
        return DocumentLine(info, self.kv(info)), chunks

    def chunk(self, chunk_id: str) -> ChunkView:
        """All of one chunk. Raises NotInLibrary."""
        name = ChunkId(chunk_id)
        found = self._catalogue.chunks([name]).get(name)
        places = self._catalogue.places_of(name)
        info = self._catalogue.document(places[0][0]) if places else None
        if found is None or info is None:
            raise NotInLibrary(f"no chunk {_short(chunk_id)!r} here; was its document removed?")
        place = places[0][1]
        return ChunkView(
            chunk=found,
            document=info,
            place=place,
            asked=self._uses.count(name),
            kv_bytes=self._kv_bytes(found),
            previous=self._catalogue.chunk_at(info.id, place - 1),
            following=self._catalogue.chunk_at(info.id, place + 1),
            neighbours=self._neighbours(name),
        )

    def search(self, query: str, k: int, how: SearchOptions) -> list[SearchHit]:
        """The `k` best chunks, best first."""
        found = []
        for hit in self._kb.search(query, k, how):
            document, chunk = hit.document, hit.chunk
            chars = None if document is None else self._catalogue.chars_of(document, chunk.id)
            copies = self._kv_bytes(chunk)
            tier = "host" if "host" in copies else next(iter(copies), None)
            found.append(SearchHit(hit, chars, tier))
        return found

    def hottest(self, limit: int) -> list[HotChunk]:
        """The chunks that were in most prompts."""
        most = self._uses.most(limit)
        chunks = self._catalogue.chunks([chunk_id for chunk_id, _ in most])
        lines = []
        for chunk_id, asked in most:
            places = self._catalogue.places_of(chunk_id)
            if chunk_id in chunks and places:  # else it was removed since
                document, place = places[0]
                lines.append(HotChunk(chunks[chunk_id], place, asked, document))
        return lines

    def _neighbours(self, chunk_id: ChunkId) -> list[Hit]:
        kb = self._kb
        vector = self._catalogue.vectors_of_chunks([chunk_id], kb.settings.dim).get(chunk_id)
        if vector is None:
            return []
        hits = kb.search(vector, NEIGHBOURS + 1)
        return [hit for hit in hits if hit.chunk.id != chunk_id][:NEIGHBOURS]

    def _kv_bytes(self, chunk: Chunk) -> dict[str, int]:
        """Behind the usual system prompt, and isolated where that is another. Empty where chunk KV
        is made elsewhere."""
        if self._library is None:
            return {}
        encoder, ids = self._library.encoder, chunk.token_ids
        return self._library.store.copies({encoder.key(ids), encoder.exact_key(ids)})

    def _info(self, document_id: str) -> DocumentInfo:
        info = self._catalogue.document(DocumentId(document_id))
        if info is None:
            raise NotInLibrary(f"no document {_short(document_id)!r} here; was it removed?")
        return info


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:40]}…"
