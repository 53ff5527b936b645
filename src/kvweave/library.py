"""A knowledge base together with the chunk KV that one model has computed for it.

    <folder>/            the knowledge base, see corpus/knowledge_base.py
    <folder>/kv/         chunk KV and who its neighbours were; may be deleted at any time

Part of the composition root: only `app.py` uses it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kvweave.asking import exact_request
from kvweave.corpus.catalogue import Written
from kvweave.corpus.embedder import Embedder, SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.settings import read_settings
from kvweave.engine.request import EngineRequest, FusedPart, LoadCost
from kvweave.engine.sampling import Sampling
from kvweave.errors import RequestError
from kvweave.fuse.chunk_encoder import ChunkEncoder, Texts
from kvweave.fuse.neighbours import NeighbourTable
from kvweave.fuse.prefill import PromptChunk
from kvweave.fuse.preparation import Preparation, choose_preparation, write_preparation
from kvweave.fuse.room import check_room
from kvweave.fuse.strategy import Strategy
from kvweave.ingest.pipeline import IngestOptions, ingest
from kvweave.ingest.report import IngestReport, OnProgress
from kvweave.ingest.sources import Source
from kvweave.kv.codec import dtype_name
from kvweave.kv.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.kv.keys import KeyContext
from kvweave.kv.residency import Residency
from kvweave.kv.store import KVStore
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.locate import locate
from kvweave.plan.plan import Reason
from kvweave.prompt import SYSTEM, Prompt, split_template
from kvweave.tokenizer import Tokenizer
from kvweave.types import DocumentId
from kvweave.upkeep import KV_FOLDER as KV_FOLDER
from kvweave.upkeep import Forgotten, Upkeep, neighbours_of, open_table, remove_documents

# 3.7 times smaller than float32 at 3e-5 nats per token (bench/codec_kl.py, SmolLM2, 50 prompts).
CODEC = "int8"
DEFAULT_EMBEDDER = "minilm"

OpenEmbedder = Callable[[str], Embedder]


def open_sentence_embedder(name: str) -> Embedder:
    return SentenceEmbedder(locate(name), name=name)


def open_store(folder: Path) -> KVStore:
    """The chunk KV of the knowledge base in `folder`: host memory over its disk."""
    return KVStore(StoreConfig(tiers=(HostTierConfig(), DiskTierConfig(folder / KV_FOLDER))))


def key_context(
    decoder: Decoder, tokenizer: Tokenizer, system: str = SYSTEM, tenant_salt: str = ""
) -> KeyContext:
    """What this model's chunk KV depends on, besides the chunk."""
    preamble_ids, _ = split_template(tokenizer, system)
    return KeyContext(
        model=decoder.revision,
        dtype=dtype_name(decoder.dtype),
        codec=CODEC,
        tokenizer=tokenizer.fingerprint,
        preamble_ids=tuple(preamble_ids),
        rope=repr(decoder.spec.rope),
        tenant_salt=tenant_salt,
    )


def make_encoder(
    decoder: Decoder,
    tokenizer: Tokenizer,
    store: KVStore,
    preparation: Preparation,
    system: str,
    kb: KnowledgeBase,
    table: NeighbourTable | None,
    tenant_salt: str = "",
) -> ChunkEncoder:
    """An encoder for the chunks of `kb` behind `system`. `table` as `open_table` gives it."""
    _, closing = split_template(tokenizer, system)
    return ChunkEncoder(
        decoder,
        store,
        key_context(decoder, tokenizer, system, tenant_salt),
        preparation,
        Texts.of(tokenizer, preparation, closing),
        neighbours_of=(
            None if table is None else neighbours_of(kb, table, preparation.variant.size)
        ),
    )


class Encoding(NamedTuple):
    """What ingest needs to make chunk KV and to keep it in step with the documents."""

    encoder: ChunkEncoder
    upkeep: Upkeep


@contextmanager
def chunk_encoder(
    kb: KnowledgeBase,
    model: str,
    encoding: str | None = None,
    extras: Sequence[str] | None = None,
    *,
    refresh: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    quant: str = "none",
) -> Iterator[Encoding]:
    """An encoder for ingest without a Weave: loads the model, closes the store behind it.

    `encoding` and `extras` None are what the knowledge base has.
    """
    preparation = choose_preparation(kb.folder / KV_FOLDER, encoding, extras)
    model_folder = locate(model)
    decoder = load_decoder(model_folder, device=device, dtype=dtype, quant=quant)
    with ExitStack() as stack:
        store = stack.enter_context(open_store(kb.folder))
        table = open_table(kb.folder, preparation)
        if table is not None:
            stack.callback(table.close)
        tokenizer = Tokenizer(model_folder)
        encoder = make_encoder(decoder, tokenizer, store, preparation, SYSTEM, kb, table)
        check_room(encoder, decoder.spec.max_context, kb.settings.chunk_tokens)
        upkeep = Upkeep(kb, table, store, encoder, encodes=True, refresh=refresh)
        write_preparation(kb.folder / KV_FOLDER, preparation)
        yield Encoding(encoder, upkeep)


@contextmanager
def upkeep_without_model(kb: KnowledgeBase) -> Iterator[tuple[None, Upkeep]]:
    """Keeps the chunk KV that is there in step with the documents; computes none."""
    table = open_table(kb.folder)
    try:
        yield None, Upkeep(kb, table)
    finally:
        if table is not None:
            table.close()


def remove_with_kv(kb: KnowledgeBase, ids: Sequence[DocumentId]) -> Written:
    """Remove documents and their chunk KV where no store is open."""
    with upkeep_without_model(kb) as (_, upkeep):
        return remove_documents(kb, ids, upkeep)


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
    ) -> "Library":
        """Open or make the knowledge base; None is what it was made with.

        `open_embedder` lets several share one embedder; chunk KV is shared with those alone who
        have the same `tenant_salt`.
        """
        preparation = choose_preparation(folder / KV_FOLDER, encoding, extras)
        stored = read_settings(folder)
        name = embedder or (stored.embedder if stored else DEFAULT_EMBEDDER)
        kb = KnowledgeBase.open(
            folder,
            tokenizer=tokenizer,
            embedder=(open_embedder or open_sentence_embedder)(name),
            create=True,
        )
        store = open_store(folder)
        table = open_table(folder, preparation)
        encoder = make_encoder(
            decoder, tokenizer, store, preparation, system, kb, table, tenant_salt
        )
        library = cls(kb, store, decoder, encoder, table)
        library.repair()
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
    ) -> IngestReport:
        """Documents to chunks and vectors, and to chunk KV if asked for."""
        encoder = self.encoder if chunk_kv else None
        upkeep = self._upkeep(encodes=chunk_kv, refresh=refresh_neighbours)
        if chunk_kv:
            max_context = self._decoder.spec.max_context
            check_room(self.encoder, max_context, self.kb.settings.chunk_tokens)
            write_preparation(self.kb.folder / KV_FOLDER, self.encoder.preparation)
        return ingest(self.kb, sources, encoder, progress=progress, options=options, upkeep=upkeep)

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

    def _upkeep(self, *, encodes: bool = False, refresh: bool = False) -> Upkeep:
        return Upkeep(
            self.kb,
            self._table,
            self.store,
            self.encoder,
            encodes=encodes,
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
