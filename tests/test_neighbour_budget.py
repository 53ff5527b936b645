"""What a neighbour brings is stored as well, and gives way to what is served."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.encoders import make_encoder
from kvweave.fuse.preparation import Preparation
from kvweave.fuse.saves import Saves
from kvweave.kept_kv import KV_FOLDER
from kvweave.kv.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.kv.store import KVStore
from kvweave.library import Library
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.neighbourhood import open_table
from kvweave.prompt import SYSTEM
from kvweave.tokenizer import Tokenizer
from kvweave.types import Chunk
from tiny_corpus import WordEmbedder, make_folder
from tiny_models import make_chat_model_folder

PLENTY = 1 << 30


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def decoder(model_folder: Path) -> Decoder:
    return load_decoder(model_folder, device="cpu", dtype="float32")


class World:
    def __init__(self, folder: Path, model_folder: Path, decoder: Decoder) -> None:
        self._folder = folder
        self._tokenizer = Tokenizer(model_folder)
        self._decoder = decoder
        self.docs = make_folder(folder / "docs", 2)

    @contextmanager
    def library(self, name: str, disk_bytes: int) -> Iterator[Library]:
        folder, preparation = self._folder / name, Preparation.parse("neighbours:2")
        kb = KnowledgeBase.open(
            folder,
            tokenizer=self._tokenizer,
            embedder=WordEmbedder(),
            chunk_tokens=64,
            create=True,
        )
        disk = DiskTierConfig(folder / KV_FOLDER, disk_bytes)
        store = KVStore(StoreConfig(tiers=(HostTierConfig(1 << 20), disk)))
        table = open_table(folder, preparation)
        encoder = make_encoder(
            self._decoder, self._tokenizer, store, preparation, SYSTEM, kb, table
        )
        library = Library(kb, store, self._decoder, encoder, table)
        try:
            yield library
        finally:
            library.close()

    def ingest(self, library: Library) -> Saves:
        library.ingest([self.docs], chunk_kv=True)
        assert library.store.flush()
        return library.encoder.saves()


@pytest.fixture
def world(tmp_path: Path, model_folder: Path, decoder: Decoder) -> World:
    return World(tmp_path, model_folder, decoder)


def chunks_of(library: Library) -> list[Chunk]:
    return [chunk for batch in library.kb.catalogue.all_chunks(64) for chunk in batch]


def on_disk(library: Library) -> dict[str, int]:
    files = (library.kb.folder / KV_FOLDER).rglob("*.kv")
    return {path.stem: path.stat().st_size for path in files}


def test_a_tight_disk_keeps_all_that_is_served_and_the_next_ingest_computes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.library("roomy", PLENTY) as library:
        world.ingest(library)
        sizes = on_disk(library)
        keys = [library.encoder.exact_key(chunk.token_ids) for chunk in chunks_of(library)]
        budget = int(2.25 * sum(sizes[key.hex()] for key in keys))
        assert budget < sum(sizes.values()), "or nothing is tight"
    with world.library("tight", budget) as library:
        saves = world.ingest(library)
        encoder, chunks = library.encoder, chunks_of(library)
        served = [key(c.token_ids) for c in chunks for key in (encoder.exact_key, encoder.key)]
        assert {key.hex() for key in served} <= on_disk(library).keys()
        assert (saves.saved, saves.dropped) == (len(served), 0)
        library.store.check_integrity()

    def compute(*_: object) -> None:
        raise AssertionError("computed again")

    for module in ("chunk_encoder", "neighbour_encoder"):
        monkeypatch.setattr(f"kvweave.fuse.{module}.encode_chunks", compute)
    with world.library("tight", budget) as library:
        assert world.ingest(library).saved == 0
        assert {key.hex() for key in served} <= on_disk(library).keys()
