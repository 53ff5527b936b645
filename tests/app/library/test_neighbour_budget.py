"""What a neighbour brings is stored as well, and gives way to what is served."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvweave.app.library.library import Library
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.library.stored_kv import KV_FOLDER
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.fuse.encode.save_log import Saves
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk
from worlds.kv_checks import check_store
from worlds.tiny_corpus import WordEmbedder, make_folder
from worlds.tiny_models import make_chat_model_folder
from worlds.weaves import library_over

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
        folder = self._folder / name
        kb = KnowledgeBase.open(
            folder,
            tokenizer=self._tokenizer,
            embedder=WordEmbedder(),
            chunk_tokens=64,
            create=True,
        )
        disk = DiskTierConfig(folder / KV_FOLDER, disk_bytes)
        options = KVOptions("neighbours:2", tiers=(HostTierConfig(1 << 20), disk))
        library = library_over(kb, self._decoder, self._tokenizer, options)
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


def served_keys(library: Library) -> set[str]:
    encoder = library.encoder
    ids = [chunk.token_ids for chunk in chunks_of(library)]
    return {encoder.key(each).hex() for each in ids}


def tight_budget(world: World) -> int:
    """A little more than all that is served takes: no room for what neighbours bring."""
    with world.library("roomy", PLENTY) as library:
        world.ingest(library)
        sizes, served = on_disk(library), served_keys(library)
        budget = int(1.125 * sum(sizes[key] for key in served))
        assert budget < sum(sizes.values()), "or nothing is tight"
    return budget


def forbid_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("kvweave.fuse.encode.chunk_encoder.ChunkPass", compute)
    monkeypatch.setattr("kvweave.fuse.encode.neighbour_encoder.encode_chunks", compute)


def test_a_tight_disk_keeps_all_that_is_served_and_the_next_ingest_computes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = tight_budget(world)
    with world.library("tight", budget) as library:
        saves, served = world.ingest(library), served_keys(library)
        assert served <= on_disk(library).keys()
        assert (saves.saved, saves.dropped) == (len(served), 0)
        check_store(library.store)
    forbid_computing(monkeypatch)
    with world.library("tight", budget) as library:
        assert world.ingest(library).saved == 0
        assert served <= on_disk(library).keys()


def test_copies_of_an_earlier_run_give_way_as_well(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = tight_budget(world)
    later = sorted(path for path in world.docs.rglob("*") if path.is_file())[-1]
    later.rename(tmp_path / later.name)
    with world.library("tight", budget) as library:  # with room for all that neighbours bring
        world.ingest(library)
        assert served_keys(library) < on_disk(library).keys()
    (tmp_path / later.name).rename(later)
    with world.library("tight", budget) as library:
        world.ingest(library)
        assert served_keys(library) <= on_disk(library).keys()
    forbid_computing(monkeypatch)
    with world.library("tight", budget) as library:
        assert world.ingest(library).saved == 0
