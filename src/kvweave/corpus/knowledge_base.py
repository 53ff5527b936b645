"""The knowledge base: one folder, and the facade that the rest of kvweave sees.

    kb.json              what it was made with
    catalogue.sqlite     documents, chunks, vectors, words: the truth
    index/               a vector index, derived; may be deleted at any time
    writer.lock          held by the one process that writes

Any number of processes may read and search while one writes.
"""

import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.corpus.catalogue import Catalogue, DocumentInfo, Totals, Written
from kvweave.corpus.catalogue_index import FILE, CatalogueIndex
from kvweave.corpus.chunker import Chunker
from kvweave.corpus.disk_files import disk_trouble, sweep_temporaries
from kvweave.corpus.embedder import Embedder
from kvweave.corpus.index import check_kind
from kvweave.corpus.index.base import Vector
from kvweave.corpus.kb_folder import CATALOGUE, create_folder, renew_identity, writer_lock
from kvweave.corpus.search import ChunkSearch, SearchOptions
from kvweave.corpus.settings import (
    KnowledgeBaseSettings,
    check_settings,
    read_settings,
    write_settings,
)
from kvweave.errors import ConfigError, CorpusError, CorpusFull, CorpusReadOnly
from kvweave.types import Chunk, ChunkId, DocumentId, Hit

if TYPE_CHECKING:
    from kvweave.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

BY_VECTOR = SearchOptions()


class KnowledgeBase:
    """Searches and removals may come from any thread. `close` when done, or use `with`."""

    def __init__(
        self,
        folder: Path,
        settings: KnowledgeBaseSettings,
        *,
        tokenizer: "Tokenizer | None",
        embedder: Embedder | None,
        api_key: str | None = None,
    ) -> None:
        """Use `open`; this trusts that the parts fit together."""
        self.folder = folder
        self.settings = settings
        self._tokenizer = tokenizer
        self._embedder = embedder
        self.catalogue = Catalogue(folder / CATALOGUE, create=False)
        self._index = CatalogueIndex(folder / "index", self.catalogue, settings, api_key)
        self._search = ChunkSearch(self.catalogue, self._index, settings.dim)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        tokenizer: "Tokenizer | None" = None,
        embedder: Embedder | None = None,
        chunk_tokens: int | None = None,
        index: str | None = None,
        create: bool = False,
        api_key: str | None = None,
    ) -> "KnowledgeBase":
        """Open what is there, or create it where `create` allows.

        Listing and removing need neither tokenizer nor embedder, searching needs the embedder,
        ingesting both. Whatever is given must fit what the knowledge base was made with.
        """
        folder = Path(folder)
        settings = read_settings(folder)
        if settings is None:
            if not create:
                raise CorpusError(
                    f"no knowledge base in {folder}; make one: kvweave ingest PATH --kb {folder}"
                )
            if tokenizer is None or embedder is None:
                raise ConfigError("a new knowledge base needs a tokenizer and an embedder")
            settings = create_folder(folder, tokenizer, embedder, chunk_tokens, index)
        if embedder is not None:
            settings = renew_identity(folder, settings, embedder)
        check_settings(
            folder,
            settings,
            tokenizer=None if tokenizer is None else tokenizer.fingerprint,
            embedder_identity=None if embedder is None else embedder.identity,
            chunk_tokens=chunk_tokens,
        )
        if index is not None and index != settings.index:
            settings = replace(settings, index=check_kind(index))
            with writer_lock(folder):
                write_settings(folder, settings)
        return cls(folder, settings, tokenizer=tokenizer, embedder=embedder, api_key=api_key)

    def set_order(self, order: str | None) -> None:
        """Whether chunks may move in the prompts of questions that do not say it; None: as is
        configured. Other processes see it when they open it again."""
        with writer_lock(self.folder):
            self.settings = replace(read_settings(self.folder) or self.settings, order=order)
            write_settings(self.folder, self.settings)

    def close(self) -> None:
        self.catalogue.close()

    def __enter__(self) -> "KnowledgeBase":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── searching ────────────────────────────────────────────────────────────

    def search(self, query: str | Vector, k: int, how: SearchOptions = BY_VECTOR) -> list[Hit]:
        """The k best chunks, best first. A vector may stand for a query embedded before, where
        words are not needed."""
        *_, final = self.search_staged(query, k, 1, how)
        return final

    def search_staged(
        self, query: str | Vector, k: int, stages: int, how: SearchOptions = BY_VECTOR
    ) -> Iterator[list[Hit]]:
        """The current top-k after each of at most `stages` stages; the last is `search`'s answer.

        The caller may stop at any time and may take its time between stages.
        """
        yield from self._search.search_staged(query, k, stages, how, self._embed_query)

    def load_index(self) -> None:
        """Bring the vector index up to date, from disk if need be, so that a search finds it so."""
        self._index.refresh()

    def num_stages(self, k: int, stages: int, how: SearchOptions = BY_VECTOR) -> int:
        """The stages that `search_staged` has if it may have `stages`."""
        return self._search.num_stages(k, stages, how)

    def nearest(self, chunks: Sequence[Chunk], n: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        """For each chunk the ids of the `n` others most like it, nearest first; fewer if there are.

        Neither the chunk itself nor another with the same words under another title, and of chunks
        that say the same only the nearest. By the stored vectors: nothing is embedded again.
        """
        return self._search.nearest(chunks, n)

    def warm(self) -> None:
        """Load the embedder now: it loads on first use, and no question should wait for that."""
        self._embed_query("")

    def _embed_query(self, text: str) -> Vector:
        return self.embedder.embed_query(text)

    # ── looking around ───────────────────────────────────────────────────────

    def chunks(self, ids: Sequence[ChunkId]) -> list[Chunk]:
        """In the order asked for. All of them must exist."""
        found = self.catalogue.chunks(ids)
        missing = [chunk_id for chunk_id in ids if chunk_id not in found]
        if missing:
            raise CorpusError(f"{self.folder} has no chunk {missing[0]}; was its document removed?")
        return [found[chunk_id] for chunk_id in ids]

    def documents(self) -> list[DocumentInfo]:
        return self.catalogue.documents()

    def find(self, reference: str) -> list[DocumentInfo]:
        """Documents by id, by the beginning of an id (6 or more characters), or by file."""
        documents = self.documents()
        exact = [d for d in documents if d.id == reference]
        if exact:
            return exact
        try:
            path = str(Path(reference).expanduser().resolve())
        except (OSError, RuntimeError, ValueError):  # nothing that a file could be called
            path = reference
        by_source = [d for d in documents if d.source in (reference, path)]
        by_prefix = [d for d in documents if len(reference) >= 6 and d.id.startswith(reference)]
        found = by_source or by_prefix
        if not found:
            raise CorpusError(
                f"{self.folder} has no document {reference!r}; see: kvweave docs ls --kb "
                f"{self.folder}"
            )
        if not by_source and len(found) > 1:
            raise CorpusError(f"{reference!r} begins {len(found)} document ids; give more of it")
        return found

    def totals(self) -> Totals:
        return self.catalogue.totals()

    def check(self) -> list[str]:
        """Everything that does not fit together, in words. Empty for a sound knowledge base.

        What is being written beside it, as chunk KV is, belongs to others.
        """
        ours = (self.folder, self.folder / "index")
        leftovers = [f"{p.name} was left behind" for each in ours for p in each.glob("*.tmp")]
        return [*self.catalogue.problems(), *self._index.problems(), *leftovers]

    # ── changing ─────────────────────────────────────────────────────────────

    def remove(self, reference: str) -> Written:
        """Remove documents, their vectors and their words at once.

        Returns the chunks that no other document uses: the owner of the KV store drops theirs.
        """
        return self.remove_documents([d.id for d in self.find(reference)])

    def remove_documents(self, ids: Sequence[DocumentId]) -> Written:
        """Remove several documents in one transaction. Ids that are not there are ignored."""
        with self.writing():
            written = self.catalogue.remove(ids)
            self.publish()
        return written

    @contextmanager
    def writing_if_free(self) -> Iterator[bool]:
        """Be the writer if that is free, for what can wait: yields True if we are, False if another
        one is or the folder cannot be written."""
        with ExitStack() as stack:
            try:
                stack.enter_context(writer_lock(self.folder))
                is_free = True
            except CorpusError:
                is_free = False
            yield is_free

    @contextmanager
    def writing_briefly(self) -> Iterator[None]:
        """Be the writer for a moment: who wants to write meanwhile waits, and is not refused."""
        with writer_lock(self.folder, briefly=True):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one writer. A second one is refused at once; a dead one does not count. A disk
        that is full or cannot be written is a CorpusFull or a CorpusReadOnly."""
        with writer_lock(self.folder), disk_trouble(f"cannot write {self.folder}"):
            sweep_temporaries(self.folder)
            sweep_temporaries(self.folder / "index")
            yield

    def drop_index(self) -> None:
        """Delete the file of the index, which `publish` makes again. Only inside `writing`."""
        (self.folder / "index" / FILE).unlink(missing_ok=True)

    def publish(self) -> None:
        """Bring the index up to date and everything onto the disk. Only inside `writing`."""
        self.catalogue.checkpoint()
        try:
            self._index.publish()
            self.catalogue.removals.prune()
        except (OSError, sqlite3.OperationalError, CorpusFull, CorpusReadOnly) as error:
            # Documents are in the catalogue, or out of it, for good: that the index file is behind
            # costs the next one who opens it some time, and is no reason to say otherwise.
            log.warning("%s: the index is not saved: %s", self.folder, error)

    @property
    def chunker(self) -> Chunker:
        if self._tokenizer is None:
            raise ConfigError("this knowledge base was opened without a tokenizer: read-only")
        return Chunker(self._tokenizer, self.settings.chunk_tokens)

    @property
    def embedder(self) -> Embedder:
        if self._embedder is None:
            raise ConfigError("this knowledge base was opened without an embedder: no search")
        return self._embedder
