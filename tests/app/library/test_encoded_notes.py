"""An upload looks at the chunks it brings, not at all of them; every chunk has KV all the same."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvweave.app.library.kv_sync import FILE
from kvweave.app.library.library import Library
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.library.stored_kv import KV_FOLDER
from kvweave.config import StoreSettings
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.ingest.sources import TextSource
from kvweave.kv.lookup import Residency
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk, EncodeWork
from worlds.tiny_corpus import WordEmbedder
from worlds.tiny_models import make_chat_model_folder
from worlds.weaves import library_over

Open = Callable[..., "contextmanager[Looked]"]
WORDS = ["node", "pod", "volume", "claim", "quota", "taint", "lease", "probe"]


class Looked:
    """A library, and which chunks its encoder was offered."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._offered: list[str] = []
        self._missing = library.encoder.missing
        self.fails = False
        library.encoder.missing = self.missing  # type: ignore[method-assign]

    def missing(self, chunks: Sequence[Chunk]) -> EncodeWork:
        if self.fails:
            raise RuntimeError("the device is gone")
        self._offered += [chunk.title for chunk in chunks]
        return self._missing(chunks)

    def add(self, *words: str, only_new: bool = True, chunk_kv: bool = True) -> list[str]:
        """Bring a document for each word; give what was looked at."""
        sources = [
            TextSource(word, f"A {word} near another {word} has {i} of its own.", word)
            for i, word in enumerate(words)
        ]
        self._offered.clear()
        self.library.ingest(sources, chunk_kv=chunk_kv, only_new=only_new)
        return sorted(self._offered)

    def remove(self, word: str) -> None:
        (found,) = [d for d in self.library.kb.documents() if d.title == word]
        self.library.remove(found.id)

    def without_kv(self) -> list[str]:
        """Chunks that have no KV behind their encoding context."""
        encoder, store = self.library.encoder, self.library.store
        chunks = [c for batch in self.library.kb.catalogue.all_chunks(64) for c in batch]
        return [
            chunk.title
            for chunk in chunks
            if store.peek([encoder.key(chunk.token_ids)])[0].residency is Residency.ABSENT
        ]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def decoder(model_folder: Path) -> Decoder:
    return load_decoder(model_folder, device="cpu", dtype="float32")


@pytest.fixture
def opened(tmp_path: Path, model_folder: Path, decoder: Decoder) -> Open:
    @contextmanager
    def opened(encoding: str = "filler:1") -> Iterator[Looked]:
        folder, tokenizer = tmp_path / "kb", Tokenizer(model_folder)
        kb = KnowledgeBase.open(
            folder,
            tokenizer=tokenizer,
            embedder=WordEmbedder(),
            chunk_tokens=64,
            create=True,
        )
        options = KVOptions(encoding, store=StoreSettings(host_bytes=1 << 24))
        library = library_over(kb, decoder, tokenizer, options)
        try:
            yield Looked(library)
        finally:
            library.close()

    return opened


def test_an_upload_looks_at_what_it_brings_also_after_a_restart(opened: Open) -> None:
    with opened() as kb:
        assert kb.add("node", "pod") == ["node", "pod"]
        assert kb.add("volume") == ["volume"]
        assert kb.add("volume") == [], "nothing came"
        assert kb.without_kv() == []
    with opened() as kb:
        assert kb.add("claim", "node") == ["claim", "node"], (
            "node stands first no longer: it changed"
        )
        assert kb.without_kv() == []


def test_whoever_says_nothing_has_every_chunk_looked_at(opened: Open) -> None:
    with opened() as kb:
        kb.add("node", "pod")
        assert kb.add("volume", only_new=False) == ["node", "pod", "volume"]
        assert kb.add("claim") == ["claim"], "which counts from then on"


def test_chunks_that_came_without_kv_get_it_with_the_next_upload(opened: Open) -> None:
    with opened() as kb:
        kb.add("node")
        kb.add("pod", chunk_kv=False)
        assert kb.add("volume") == ["node", "pod", "volume"]
        assert kb.without_kv() == []


def test_an_ingest_that_failed_half_way_is_made_good_by_the_next(opened: Open) -> None:
    with opened() as kb:
        kb.add("node")
        kb.fails = True
        with pytest.raises(RuntimeError, match="the device is gone"):
            kb.add("pod")
        kb.fails = False
        assert kb.add("volume") == ["node", "pod", "volume"]
        assert kb.without_kv() == []


def test_another_encoding_looks_at_every_chunk_once(opened: Open) -> None:
    with opened("isolated") as kb:
        kb.add("node", "pod")
    with opened("filler:1") as kb:
        assert kb.add("volume") == ["node", "pod", "volume"]
        assert kb.add("claim") == ["claim"]
        assert kb.without_kv() == []
    with opened("isolated") as kb:
        assert kb.add("quota") == ["claim", "node", "pod", "quota", "volume"], "it missed some"


def test_a_removal_does_not_make_the_next_upload_look_at_all(opened: Open) -> None:
    with opened() as kb:
        kb.add("node", "pod", "volume")
        kb.remove("pod")
        assert kb.add("claim") == ["claim"]
        assert kb.add("pod") == ["pod"], "it has no KV any more"
        assert kb.without_kv() == []


@pytest.mark.parametrize("damage", ["gone", "no JSON", "no object"])
def test_notes_that_are_lost_cost_one_look_at_all(
    opened: Open, tmp_path: Path, damage: str
) -> None:
    notes = tmp_path / "kb" / KV_FOLDER / FILE
    with opened() as kb:
        kb.add("node", "pod")
        if damage == "gone":
            notes.unlink()
        else:
            notes.write_text({"no JSON": "{", "no object": "[1]"}[damage])
        assert kb.add("volume") == ["node", "pod", "volume"]
        assert kb.add("claim") == ["claim"]


def test_what_could_not_be_saved_is_looked_for_again(opened: Open) -> None:
    with opened() as kb:
        save = kb.library.encoder.save
        kb.library.encoder.save = lambda *_: kb.library.encoder._saves.add_dropped() or 0  # type: ignore[method-assign]
        kb.add("node")
        kb.library.encoder.save = save  # type: ignore[method-assign]
        assert kb.add("pod") == ["node", "pod"]
        assert kb.without_kv() == []


def test_behind_neighbours_what_saw_a_changed_chunk_is_computed_again(opened: Open) -> None:
    with opened("neighbours:2") as kb:
        kb.add(*WORDS)
        assert kb.without_kv() == []
        changed = TextSource("node", "A node of another kind: node and node.", "node")
        kb.library.ingest([changed], chunk_kv=True, only_new=True)
        assert kb.without_kv() == [], "those that stood behind it as well"
        kb.remove("pod")
        assert kb.add("a lease of a volume")[-1:] == ["volume"], "some lost their neighbours: all"
        assert kb.without_kv() == []
