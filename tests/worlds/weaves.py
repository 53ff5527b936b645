"""A Weave over a tiny knowledge base: a tiny model, a tiny embedder, chunk KV in host memory."""

from pathlib import Path

from kvweave import Weave
from kvweave.app.library.encoder_setup import make_encoder
from kvweave.app.library.library import Library
from kvweave.fuse.encode.preparation import Preparation
from kvweave.kv.config import HostTierConfig, StoreConfig
from kvweave.kv.store import KVStore
from kvweave.model.decoder import Decoder
from kvweave.text.prompt import SYSTEM
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import open_kb


def open_weave(folder: Path, model: tuple[Decoder, Tokenizer], promotion: int = 2) -> Weave:
    decoder, tokenizer = model
    kb = open_kb(folder, tokenizer, chunk_tokens=256)
    store = KVStore(StoreConfig(tiers=(HostTierConfig(1 << 26),)))
    preparation = Preparation.parse("filler:1")
    encoder = make_encoder(decoder, tokenizer, store, preparation, SYSTEM, kb, None)
    library = Library(kb, store, decoder, encoder)
    return Weave(decoder, tokenizer, "tiny", SYSTEM, library, promotion=promotion)
