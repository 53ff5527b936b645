"""Chunk KV from the command line: what ingest stores, ask finds, and what is not found is said."""

import json
from pathlib import Path

import pytest

from kvweave.fuse.preparation import read_preparation
from running import Ran, Run
from tiny_corpus import WordEmbedder
from tiny_models import make_chat_model_folder

TEXTS = {
    "drain": "To drain a node, cordon the node and evict each pod on the node.",
    "volume": "A volume claim binds a volume of its size.",
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


class World:
    """A folder of documents, a knowledge base and a tiny model."""

    def __init__(self, run: Run, folder: Path, model_folder: Path) -> None:
        self._run = run
        self.kb = folder / "kb"
        self._docs = folder / "docs"
        self._model = ["--kb", self.kb, "--model", model_folder]
        self._docs.mkdir()
        for name, text in TEXTS.items():
            (self._docs / f"{name}.txt").write_text(text)

    def ingest(self, *options: str) -> Ran:
        return self._run("ingest", self._docs, *self._model, "--chunk-tokens", 64, *options)

    def stored(self, *options: str) -> Ran:
        ran = self.ingest("--kv", *options)
        assert ran.code == 0, ran.err
        return ran

    def ask(self, *options: str) -> Ran:
        return self._run("ask", "How do I drain a node?", *self._model, "--max-tokens", 2, *options)

    def states(self, *options: str) -> list[str]:
        ran = self.ask("--reuse", "reuse", "--json", *options)
        assert ran.code == 0, ran.err
        return [chunk["state"] for chunk in json.loads(ran.out)["explain"]["chunks"]]


@pytest.fixture
def world(run: Run, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("kvweave.cli.ingest.find_embedder", lambda _: WordEmbedder())
    monkeypatch.setattr("kvweave.library.SentenceEmbedder", lambda *_, **__: WordEmbedder())
    monkeypatch.setattr("kvweave.library.locate", Path)
    return World(run, tmp_path, model_folder)


def refused(ran: Ran) -> str:
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
    return ran.err


@pytest.mark.parametrize("settings", [("--dtype", "bfloat16"), ("--quant", "int8")])
def test_kv_is_found_by_who_asks_with_the_same_settings(
    world: World, settings: tuple[str, str]
) -> None:
    world.stored("--encoding", "isolated", *settings)
    assert world.states(*settings) == ["exact", "reused"]
    assert world.states() == ["computed", "computed"]


def test_what_is_not_given_stays_as_it_was_prepared(world: World) -> None:
    def prepared() -> tuple[str, tuple[str, ...]]:
        found = read_preparation(world.kb / "kv")
        assert found is not None
        return str(found.variant), found.extras

    world.stored("--encoding", "neighbours:1")
    world.stored("--extras", "inter")
    assert prepared() == ("neighbours:1", ("inter",))
    world.stored("--encoding", "isolated")
    assert prepared() == ("isolated", ("inter",))
    world.stored()
    assert prepared() == ("isolated", ("inter",))
    world.stored("--extras", "none")
    assert prepared() == ("isolated", ())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--encoding", "isolated"], "--encoding is for computing chunk KV; add --kv"),
        (["--encoding", "magic"], "add --kv"),
        (["--extras", "inter"], "--extras is for computing chunk KV; add --kv"),
        (["--dtype", "bfloat16", "--quant", "int8"], "--dtype, --quant are for"),
        (["--kv", "--encoding", "magic"], "encoding 'magic' is unknown"),
        (["--kv", "--encoding", ""], "encoding '' is unknown"),
        (["--kv", "--extras", "magic"], "extra 'magic' is unknown"),
    ],
)
def test_options_for_chunk_kv_are_judged_before_anything_is_made(
    world: World, options: list[str], says: str
) -> None:
    assert says in refused(world.ingest(*options))
    assert not world.kb.exists()


@pytest.mark.parametrize("command", ["ask", "plan"])
def test_a_folder_without_a_knowledge_base_is_refused_and_left_alone(
    run: Run, tmp_path: Path, command: str
) -> None:
    said = refused(run(command, "how?", "--kb", tmp_path, "--model", "no-such"))
    assert f"no knowledge base in {tmp_path}; make one: kvweave ingest PATH --kb" in said
    assert not any(tmp_path.iterdir())
