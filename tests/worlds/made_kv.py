"""A tiny knowledge base whose chunk KV is made in the background."""

from pathlib import Path

import pytest

from kvweave import Weave
from kvweave.app.library.library import Library
from kvweave.app.library.library_kv import BackgroundKV, KVOptions
from kvweave.app.library.runtime import ModelRuntime
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk
from worlds.tiny_corpus import make_text, open_kb
from worlds.tiny_models import make_chat_model_folder
from worlds.weaves import library_of

TEXTS = [(f"Note {i}", make_text(24, seed=i)) for i in range(6)]
Model = tuple[Decoder, Tokenizer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_chat_model_folder(tmp_path_factory.mktemp("made"), max_position_embeddings=4096)
    return load_decoder(folder, device="cpu"), Tokenizer(folder)


def opened(
    folder: Path,
    model: Model,
    background: BackgroundKV | None,
    encoding: str = "filler:1",
    disk_bytes: int = 1 << 30,
    host_bytes: int = 1 << 26,
) -> Weave:
    """Nothing is made before `start`."""
    runtime = ModelRuntime(*model, "tiny")
    kb = open_kb(folder, runtime.tokenizer, chunk_tokens=256)
    tiers = (HostTierConfig(host_bytes), DiskTierConfig(folder / "kv", capacity_bytes=disk_bytes))
    options = KVOptions(encoding, tiers=tiers, background=background)
    return Weave(runtime, library_of(kb, runtime, options))


def chunks_of(library: Library) -> dict[str, Chunk]:
    found = [c for batch in library.kb.catalogue.all_chunks(64) for c in batch]
    return {chunk.title: chunk for chunk in found}
