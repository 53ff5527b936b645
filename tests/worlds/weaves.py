"""A Weave over a tiny knowledge base: a tiny model, a tiny embedder, chunk KV in host memory."""

from pathlib import Path

from kvweave import Weave
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.library.library import Library
from kvweave.app.library.library_kv import KVOptions, LibraryKV
from kvweave.app.library.runtime import EngineClient, ModelRuntime
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.engine.config import EngineConfig
from kvweave.kv.tiers.config import HostTierConfig
from kvweave.model.decoder import Decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import open_kb


def plain_weave(
    decoder: Decoder,
    tokenizer: Tokenizer,
    engine: EngineConfig | None = None,
    name: str = "tiny",
) -> Weave:
    """A Weave without a knowledge base."""
    runtime = ModelRuntime(decoder, tokenizer, name, engine)
    return Weave(runtime, settings=AnswerSettings("Be brief."))


def library_over(
    kb: KnowledgeBase, decoder: Decoder, tokenizer: Tokenizer, options: KVOptions
) -> Library:
    """A library that computes its KV by itself: no engine runs."""
    return Library(kb, LibraryKV.open(kb, decoder, tokenizer, options), EngineClient(decoder))


def library_of(
    kb: KnowledgeBase, runtime: ModelRuntime, options: KVOptions, promotion: int = 2
) -> Library:
    """The library of a Weave: it computes its KV where the runtime's engine does."""
    run_alone = runtime.client.run_alone
    kv = LibraryKV.open(kb, runtime.decoder, runtime.tokenizer, options, run_alone=run_alone)
    return Library(kb, kv, runtime.client, promotion=promotion)


def ingest_with_fronts(weave: Weave, *sources: tuple[str, str]) -> None:
    """Bring documents in with all KV they may have: each chunk has stood in front before."""
    weave.ingest(*sources, chunk_kv=True)
    for chunks in weave.library.kb.catalogue.all_chunks(64):
        weave.library.encoder.encode_isolated(chunks)


def open_weave(folder: Path, model: tuple[Decoder, Tokenizer], promotion: int = 2) -> Weave:
    runtime = ModelRuntime(*model, "tiny")
    kb = open_kb(folder, runtime.tokenizer, chunk_tokens=256)
    options = KVOptions("filler:1", tiers=(HostTierConfig(1 << 26),))
    return Weave(runtime, library_of(kb, runtime, options, promotion))
