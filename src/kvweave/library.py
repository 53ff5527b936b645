"""A knowledge base together with the chunk KV that one model has computed for it.

    <folder>/            the knowledge base, see corpus/knowledge_base.py
    <folder>/kv/         chunk KV, see kv/store.py; may be deleted at any time

Part of the composition root: only `app.py` uses it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.settings import read_settings
from kvweave.engine.generate import FIRST_ROOM, continue_answer, room_for_answer
from kvweave.engine.sampling import Choice, Sampling
from kvweave.errors import RequestError
from kvweave.fuse.chunk_encoder import ChunkEncoder, Texts
from kvweave.fuse.prefill import PromptChunk, prefill_from_store
from kvweave.fuse.preparation import Preparation, read_preparation, write_preparation
from kvweave.fuse.record import FuseRecord
from kvweave.fuse.strategy import Strategy
from kvweave.ingest.pipeline import IngestOptions, ingest
from kvweave.ingest.report import IngestReport, OnProgress
from kvweave.ingest.sources import Source
from kvweave.kv.codec import dtype_name
from kvweave.kv.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.kv.forget import keys_of_chunks
from kvweave.kv.keys import KeyContext
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.disk import DiskTier
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.locate import locate
from kvweave.prompt import SYSTEM, Prompt, split_template
from kvweave.tokenizer import Tokenizer
from kvweave.types import ChunkId

# 3.7 times smaller than float32 at 3e-5 nats per token (bench/codec_kl.py, SmolLM2, 50 prompts).
CODEC = "int8"
DEFAULT_EMBEDDER = "minilm"
KV_FOLDER = "kv"


def open_store(folder: Path) -> KVStore:
    """The chunk KV of the knowledge base in `folder`: host memory over its disk."""
    return KVStore(StoreConfig(tiers=(HostTierConfig(), DiskTierConfig(folder / KV_FOLDER))))


def key_context(decoder: Decoder, tokenizer: Tokenizer, system: str = SYSTEM) -> KeyContext:
    """What this model's chunk KV depends on, besides the chunk."""
    preamble_ids, _ = split_template(tokenizer, system)
    return KeyContext(
        model=decoder.revision,
        dtype=dtype_name(decoder.dtype),
        codec=CODEC,
        tokenizer=tokenizer.fingerprint,
        preamble_ids=tuple(preamble_ids),
        rope=repr(decoder.spec.rope),
    )


def forget_chunk_kv(
    folder: Path, chunk_ids: Collection[ChunkId], store: KVStore | None = None
) -> int:
    """Delete the KV of these chunks from the knowledge base in `folder`; returns how many objects.

    Through `store` where one is open, so that its copies in memory go too.
    """
    if not chunk_ids or not (folder / KV_FOLDER / "objects").is_dir():
        return 0
    if store is not None:
        store.flush()  # what is still on its way must not land behind us
    tier = DiskTier(DiskTierConfig(folder / KV_FOLDER), sweep=False)
    keys = keys_of_chunks(tier, chunk_ids)
    return sum(tier.delete(key) for key in keys) if store is None else store.delete(keys)


def prepared(folder: Path, wanted: Preparation | None) -> Preparation:
    """How the knowledge base in `folder` prepares chunk KV: as wanted, as before, or as usual."""
    return wanted or read_preparation(folder / KV_FOLDER) or Preparation.parse()


def make_encoder(
    decoder: Decoder, tokenizer: Tokenizer, store: KVStore, preparation: Preparation, system: str
) -> ChunkEncoder:
    """An encoder for chunks behind `system`."""
    _, closing = split_template(tokenizer, system)
    texts = Texts.of(tokenizer, preparation, closing)
    return ChunkEncoder(decoder, store, key_context(decoder, tokenizer, system), preparation, texts)


@contextmanager
def chunk_encoder(
    folder: Path, model: str, preparation: Preparation | None = None
) -> Iterator[ChunkEncoder]:
    """An encoder for ingest without a Weave: loads the model, closes the store behind it."""
    preparation = prepared(folder, preparation)
    model_folder = locate(model)
    decoder = load_decoder(model_folder)
    with open_store(folder) as store:
        write_preparation(folder / KV_FOLDER, preparation)
        yield make_encoder(decoder, Tokenizer(model_folder), store, preparation, SYSTEM)


class Library:
    """Ingests and answers from one knowledge base. The decoder's owner serialises calls."""

    def __init__(
        self, kb: KnowledgeBase, store: KVStore, decoder: Decoder, encoder: ChunkEncoder
    ) -> None:
        self.kb = kb
        self.store = store
        self._decoder = decoder
        self.encoder = encoder

    @classmethod
    def open(
        cls,
        folder: Path,
        decoder: Decoder,
        tokenizer: Tokenizer,
        system: str = SYSTEM,
        embedder: str | None = None,
        preparation: Preparation | None = None,
    ) -> "Library":
        """Open or make the knowledge base; None is what it was made with."""
        stored = read_settings(folder)
        name = embedder or (stored.embedder if stored else DEFAULT_EMBEDDER)
        kb = KnowledgeBase.open(
            folder,
            tokenizer=tokenizer,
            embedder=SentenceEmbedder(locate(name), name=name),
            create=True,
        )
        store = open_store(folder)
        encoder = make_encoder(decoder, tokenizer, store, prepared(folder, preparation), system)
        return cls(kb, store, decoder, encoder)

    def close(self) -> None:
        self.store.close()
        self.kb.close()

    def ingest(
        self,
        sources: Sequence[Source],
        *,
        chunk_kv: bool,
        progress: OnProgress | None = None,
        options: IngestOptions | None = None,
    ) -> IngestReport:
        """Documents to chunks and vectors, and to chunk KV if asked for."""
        encoder = self.encoder if chunk_kv else None
        if chunk_kv:
            write_preparation(self.kb.folder / KV_FOLDER, self.encoder.preparation)
        report = ingest(self.kb, sources, encoder, progress=progress, options=options)
        self.forget(report.orphaned)
        return report

    def remove(self, reference: str) -> int:
        """Remove a document by id or file; returns how many chunks went with it, KV and all."""
        orphaned = self.kb.remove(reference).orphaned
        self.forget(orphaned)
        return len(orphaned)

    def forget(self, chunk_ids: Collection[ChunkId]) -> None:
        """Delete the KV of chunks that no document uses any more, whichever model computed it."""
        forget_chunk_kv(self.kb.folder, chunk_ids, self.store)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        eos_ids: Collection[int],
        strategy: Strategy,
        ratio: float,
        on_record: Callable[[FuseRecord], None],
    ) -> Iterator[Choice]:
        """Answer with stored chunk KV as `strategy` says; what is not stored is computed.

        Checks at once, computes when iterated. `on_record` hears how the prompt was prefilled,
        before the first choice.
        """
        if self.encoder.preamble_ids != prompt.preamble:
            raise RequestError(
                "stored chunk KV belongs to the system prompt it was computed behind; "
                "ask without another one, or with reuse='full'"
            )
        return self._generate(prompt, sampling, eos_ids, strategy, ratio, on_record)

    def _generate(
        self,
        prompt: Prompt,
        sampling: Sampling,
        eos_ids: Collection[int],
        strategy: Strategy,
        ratio: float,
        on_record: Callable[[FuseRecord], None],
    ) -> Iterator[Choice]:
        ids, encoder = prompt.token_ids, self.encoder
        room = room_for_answer(self._decoder, ids, sampling)
        kv = self._decoder.new_kv(len(ids) + min(room, FIRST_ROOM))
        prefilled = prefill_from_store(
            self._decoder,
            encoder.preamble,
            [PromptChunk(c, encoder.key(c), encoder.exact_key(c)) for c in prompt.chunks],
            prompt.question,
            self.store,
            kv,
            strategy,
            ratio,
            asked=prompt.asked,
            encoding=str(encoder.preparation.variant),
        )
        on_record(prefilled.record)
        yield from continue_answer(self._decoder, ids, kv, prefilled.logits, sampling, eos_ids)
