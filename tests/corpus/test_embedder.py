"""A real sentence-transformers model, tiny and untrained, through the embedder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvweave.corpus.embedder import Instructions, SentenceEmbedder
from kvweave.errors import ModelNotFound
from worlds.tiny_embedder import make_embedder_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder_folder(tmp_path_factory.mktemp("embedder"))


def test_vectors_have_length_one_and_do_not_depend_on_the_batch(model: Path) -> None:
    embedder = SentenceEmbedder(model)
    texts = ["drain the node", "evict", "the node " * 10]
    together = embedder.embed_passages(texts)
    assert together.dtype == np.float32
    assert together.shape == (3, embedder.dim) == (3, 16)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
    alone = np.concatenate([embedder.embed_passages([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(embedder.embed_query("evict"), together[1], atol=1e-5)
    assert embedder.embed_passages([]).shape == (0, 16)


def test_identity_follows_the_weights_not_the_folder(model: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(model, tmp_path / "moved")
    assert SentenceEmbedder(moved).identity == SentenceEmbedder(model).identity
    other = make_embedder_folder(tmp_path / "other", seed=1)
    assert SentenceEmbedder(other).identity != SentenceEmbedder(model).identity


def test_identity_does_not_tell_when_the_model_was_downloaded(model: Path, tmp_path: Path) -> None:
    seen = {SentenceEmbedder(model).identity}
    for made in ("2026-01-01T00:00:00+00:00", "2026-02-02T00:00:00+00:00"):
        copy = Path(shutil.copytree(model, tmp_path / made[:7]))
        (copy / "manifest.json").write_text(json.dumps({"made": made}))
        seen.add(SentenceEmbedder(copy).identity)
    assert len(seen) == 1


def test_instructions_come_from_the_model_first_and_from_its_family_second(
    model: Path, tmp_path: Path
) -> None:
    assert SentenceEmbedder(model).instructions == Instructions("", "")
    by_family = SentenceEmbedder(model, name="intfloat/e5-small-v2")
    assert by_family.instructions == Instructions("query: ", "passage: ")
    config_path = (
        Path(shutil.copytree(model, tmp_path / "own")) / "config_sentence_transformers.json"
    )
    config = json.loads(config_path.read_text())
    config["prompts"] = {"query": "query : ", "passage": ""}
    config_path.write_text(json.dumps(config))
    own = SentenceEmbedder(config_path.parent, name="e5-like")
    assert own.instructions == Instructions("query : ", "")
    plain = SentenceEmbedder(model)
    np.testing.assert_allclose(
        own.embed_query("drain"), plain.embed_query("query : drain"), atol=1e-5
    )
    np.testing.assert_allclose(
        own.embed_passages(["drain"]), plain.embed_passages(["drain"]), atol=1e-5
    )


def test_only_the_models_own_name_tells_its_family(model: Path, tmp_path: Path) -> None:
    (tmp_path / "release5-models").mkdir()
    linked = tmp_path / "release5-models" / "minilm"
    linked.symlink_to(model)
    for name in (str(linked), "e5-models/minilm", "finance5-small", "e5mistral"):
        assert SentenceEmbedder(model, name=name).instructions == Instructions()
    for name in ("e5-small-v2", "intfloat/multilingual-e5-base", "models/E5-large"):
        assert SentenceEmbedder(model, name=name).instructions.query == "query: "
    assert SentenceEmbedder(linked).identity == SentenceEmbedder(model).identity


def test_identity_follows_the_instructions_and_every_file_of_the_model(
    model: Path, tmp_path: Path
) -> None:
    seen = {SentenceEmbedder(model).identity, SentenceEmbedder(model, name="e5-x").identity}
    for name in ("tokenizer_config.json", "1_Pooling/config.json", "2_Dense/model.safetensors"):
        copy = Path(shutil.copytree(model, tmp_path / str(len(seen))))
        (copy / name).parent.mkdir(exist_ok=True)
        with (copy / name).open("ab") as file:
            file.write(b" ")
        seen.add(SentenceEmbedder(copy).identity)
    assert len(seen) == 5


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no embedder .*give a sentence-transformers folder"):
        SentenceEmbedder(tmp_path).embed_query("x")
