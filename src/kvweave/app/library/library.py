"""A knowledge base together with the chunk KV that one model has computed for it.

    <folder>/            the knowledge base, see corpus/knowledge_base.py
    <folder>/kv/         chunk KV and who its neighbours were; may be deleted at any time

Part of the composition root: `app.py`, `ways.py`, `planning.py` and `libraries.py` use it.
"""

import logging
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from kvweave.app.answer.engine_client import exact_request
from kvweave.app.library.encoder_setup import calibrated, make_encoder, open_store
from kvweave.app.library.kv_sync import Forgotten, KVSync, remove_documents
from kvweave.app.library.neighbours import open_table
from kvweave.app.library.stored_kv import KV_FOLDER
from kvweave.corpus.embedder import Embedder, SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.settings import read_settings
from kvweave.engine.request import EngineRequest, FusedPart, LoadCost
from kvweave.engine.sampling import Sampling
from kvweave.errors import RequestError
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.context_room import check_room
from kvweave.fuse.encode.neighbour_table import NeighbourTable
from kvweave.fuse.encode.preparation import choose_preparation, write_preparation
from kvweave.fuse.prompt_chunks import PromptChunk
from kvweave.fuse.strategy import Strategy
from kvweave.ingest.pipeline import IngestOptions, ingest
from kvweave.ingest.report import IngestReport, OnProgress
from kvweave.ingest.sources import Source
from kvweave.kv.residency import Residency
from kvweave.kv.store import KVStore
from kvweave.model.decoder import Decoder
from kvweave.model.files.locate import locate
from kvweave.plan.plan import Reason
from kvweave.text.prompt import SYSTEM, Prompt
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import ChunkId

log = logging.getLogger(__name__)

DEFAULT_EMBEDDER = "minilm"

OpenEmbedder = Callable[[str], Embedder]


def open_sentence_embedder(name: str) -> Embedder:
    return SentenceEmbedder(locate(name), name=name)


class Library:
    """Ingests from one knowledge base and says how its chunks are answered from. Any thread may
    make requests; one at a time ingests."""

    def __init__(
        self,
        kb: KnowledgeBase,
        store: KVStore,
        decoder: Decoder,
        encoder: ChunkEncoder,
        table: NeighbourTable | None = None,
    ) -> None:
        """`table` is the one the encoder was made with; the library closes it."""
        self.kb = kb
        self.store = store
        self._decoder = decoder
        self.encoder = encoder
        self._table = table
        self.forgotten: Forgotten | None = None  # hears of chunks that are no more
        store.know_by(self._known)

    @classmethod
    def open(
        cls,
        folder: Path,
        decoder: Decoder,
        tokenizer: Tokenizer,
        system: str = SYSTEM,
        embedder: str | None = None,
        encoding: str | None = None,
        extras: Sequence[str] | None = None,
        *,
        open_embedder: OpenEmbedder | None = None,
        tenant_salt: str = "",
        host_bytes: int | None = None,
    ) -> "Library":
        """Open or make the knowledge base; None is what it was made with.

        `open_embedder` lets several share one embedder; chunk KV is shared with those alone who
        have the same `tenant_salt`. `host_bytes` is what its host tier may have, None the usual.
        """
        preparation = choose_preparation(folder / KV_FOLDER, encoding, extras)
        preparation = calibrated(preparation, encoding, decoder, tokenizer, system)
        stored = read_settings(folder)
        name = embedder or (stored.embedder if stored else DEFAULT_EMBEDDER)
        with ExitStack() as stack:  # a part that does not open leaves no other part open
            kb = stack.enter_context(
                KnowledgeBase.open(
                    folder,
                    tokenizer=tokenizer,
                    embedder=(open_embedder or open_sentence_embedder)(name),
                    create=True,
                )
            )
            store = stack.enter_context(open_store(folder, host_bytes))
            table = open_table(folder, preparation)
            if table is not None:
                stack.callback(table.close)
            encoder = make_encoder(
                decoder, tokenizer, store, preparation, system, kb, table, tenant_salt
            )
            library = cls(kb, store, decoder, encoder, table)
            library.repair()
            stack.pop_all()
        return library

    def close(self) -> None:
        self.store.close()
        if self._table is not None:
            self._table.close()
        self.kb.close()

    def ingest(
        self,
        sources: Sequence[Source],
        *,
        chunk_kv: bool,
        progress: OnProgress | None = None,
        options: IngestOptions | None = None,
        refresh_neighbours: bool = False,
        only_new: bool = False,
    ) -> IngestReport:
        """Documents to chunks and vectors, and to chunk KV if asked for: of every chunk that has
        none, or with `only_new` of those that come, once all others are known to have been looked
        at with this encoding."""
        encoder = self.encoder if chunk_kv else None
        upkeep = self._upkeep(encodes=chunk_kv, refresh=refresh_neighbours, only_new=only_new)
        if chunk_kv:
            max_context = self._decoder.spec.max_context
            check_room(self.encoder, max_context, self.kb.settings.chunk_tokens)
            write_preparation(self.kb.folder / KV_FOLDER, self.encoder.preparation)
        return ingest(self.kb, sources, encoder, progress=progress, options=options, kv_sync=upkeep)

    def remove(self, reference: str) -> int:
        """Remove a document by id or file; returns how many chunks went with it, KV and all."""
        ids = [document.id for document in self.kb.find(reference)]
        return len(remove_documents(self.kb, ids, self._upkeep()).orphaned)

    def repair(self) -> None:
        """Delete what a removal or an ingest that was killed has left. A writer at work does it
        itself."""
        upkeep = self._upkeep()
        if upkeep.is_settled:
            return
        with self.kb.writing_if_free() as is_free:
            if is_free:
                upkeep.before()

    def drop_copies(self, chunk_ids: Collection[ChunkId] | None) -> None:
        """Another process removed these chunks, and their files: so much for copies in memory, and
        for files written behind its back. None: nobody knows which, so all that are not there."""
        self.store.forget(chunk_ids)

    def _known(self, chunk_ids: Collection[str]) -> Collection[str]:
        try:
            return self.kb.catalogue.known([ChunkId(each) for each in chunk_ids])
        except sqlite3.Error as error:  # on a thread that brings bytes, which are not to blame
            log.warning("%s: %s; chunk KV of chunks that may be gone goes", self.kb.folder, error)
            return ()

    def _upkeep(
        self, *, encodes: bool = False, refresh: bool = False, only_new: bool = False
    ) -> KVSync:
        return KVSync(
            self.kb,
            self._table,
            self.store,
            self.encoder,
            encodes=encodes,
            only_new=only_new,
            refresh=refresh,
            forgotten=self.forgotten,
        )

    def request(
        self,
        prompt: Prompt,
        sampling: Sampling,
        eos_ids: Collection[int],
        strategy: Strategy,
        ratio: float,
        *,
        computed: Mapping[int, str] | None = None,
        use_tree: bool = False,
        expected: LoadCost | None = None,
    ) -> EngineRequest:
        """A prompt to be woven from stored chunk KV as `strategy` says; what is not stored is
        computed. `computed` as in `prefill_from_store`; `use_tree` and `expected` as the engine
        has them."""
        encoder = self.encoder
        parts = (*prompt.history, *prompt.chunks)
        chunks = [PromptChunk(c, encoder.key(c), encoder.exact_key(c)) for c in parts]
        said = len(prompt.history)  # never stored: computed, or in the tree
        told = dict.fromkeys(range(said), str(Reason.HISTORY))
        told |= {said + place: why for place, why in (computed or {}).items()}
        part = FusedPart(
            self.store,
            lambda: encoder.preamble,
            tuple(chunks),
            strategy,
            ratio,
            asked=prompt.asked,
            encoding=str(encoder.preparation.variant),
            computed=told,
            expected=expected,
        )
        exact = exact_request(prompt, sampling, eos_ids, use_tree=use_tree)
        return replace(exact, fused=part)

    def has_kv(self, chunks: Sequence[tuple[int, ...]]) -> bool:
        """Whether some tier has KV of one of these chunks."""
        encoder = self.encoder
        keys = [key(ids) for ids in chunks for key in (encoder.key, encoder.exact_key)]
        return any(peek.residency is not Residency.ABSENT for peek in self.store.peek(keys))

    def is_behind(self, prompt: Prompt) -> bool:
        """Whether a prompt has the preamble that stored chunk KV was computed behind."""
        return self.encoder.preamble_ids == prompt.preamble

    def check_preamble(self, prompt: Prompt) -> None:
        """Refuse a prompt behind another preamble than that of the stored chunk KV."""
        if not self.is_behind(prompt):
            raise RequestError(
                "stored chunk KV belongs to the system prompt it was computed behind; "
                "ask without another one, or with reuse='full'"
            )
