"""A name, a folder, a .gguf file or a hub id gives a folder; anything else says what would."""

import os
from pathlib import Path

import pytest

from kvweave.errors import ModelCorrupt, ModelNotFound
from kvweave.model.files.locate import locate
from kvweave.model.files.model_cache import ModelCache, PullStep
from worlds.gguf_files import gguf_of
from worlds.tiny_models import make_model_folder


@pytest.fixture
def model_cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "models")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return gguf_of(
        tmp_path / "some.Q8_0.gguf", make_model_folder(tmp_path, "llama", vocab_size=320)
    )


def test_a_folder_is_taken_as_it_is(tmp_path: Path, model_cache: ModelCache) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path), cache=model_cache) == tmp_path


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path, model_cache: ModelCache) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        locate(str(tmp_path), cache=model_cache)


def test_a_gguf_file_is_converted_once(gguf: Path, model_cache: ModelCache) -> None:
    steps: list[PullStep] = []
    folder = locate(str(gguf), cache=model_cache, progress=steps.append)
    assert folder.parent == model_cache.root
    assert steps[-1].what == "converting"
    again: list[PullStep] = []
    assert locate(str(gguf), cache=model_cache, progress=again.append) == folder
    assert again == []


def test_a_moved_gguf_file_is_the_same_model(gguf: Path, model_cache: ModelCache) -> None:
    folder = locate(str(gguf), cache=model_cache)
    moved = gguf.rename(gguf.with_name("moved.GGUF"))
    steps: list[PullStep] = []
    assert locate(str(moved), cache=model_cache, progress=steps.append) == folder
    assert steps == []


def test_a_changed_gguf_file_is_another_model(gguf: Path, model_cache: ModelCache) -> None:
    folder = locate(str(gguf), cache=model_cache)
    data = bytearray(gguf.read_bytes())
    data[-40] ^= 0xFF  # a weight, behind the head
    gguf.write_bytes(data)
    os.utime(gguf, ns=(1, 1))
    assert locate(str(gguf), cache=model_cache) != folder


def test_a_truncated_gguf_file_is_corrupt_and_leaves_nothing(
    gguf: Path, model_cache: ModelCache
) -> None:
    gguf.write_bytes(gguf.read_bytes()[:5000])
    with pytest.raises(ModelCorrupt, match=r"some\.Q8_0\.gguf ends at byte 5,000"):
        locate(str(gguf), cache=model_cache)
    assert model_cache.list() == []


def test_an_absent_gguf_file_is_not_found(tmp_path: Path, model_cache: ModelCache) -> None:
    with pytest.raises(ModelNotFound, match=r"absent\.gguf does not exist"):
        locate(str(tmp_path / "absent.gguf"), cache=model_cache)


def test_another_kind_of_file_is_refused(tmp_path: Path, model_cache: ModelCache) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"weights\.bin is a file but not a \.gguf"):
        locate(str(path), cache=model_cache)


@pytest.mark.parametrize("name", ["smollm3", "", "a b/c", "../up", "/no/such/folder", "a/b/c"])
def test_an_unknown_name_lists_what_would_do(name: str, model_cache: ModelCache) -> None:
    with pytest.raises(ModelNotFound, match=r"smollm2, minilm.*folder.*\.gguf.*org/name"):
        locate(name, cache=model_cache)


@pytest.mark.parametrize("pull", [True, False])
def test_a_hub_id_without_a_hub_names_the_way_out(
    pull: bool, model_cache: ModelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    assert huggingface_hub.constants.HF_HUB_OFFLINE, "conftest.py keeps tests off the network"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelNotFound, match=r"some-org/some-model .* pass its folder") as caught:
        locate("some-org/some-model", pull=pull, cache=model_cache)
    assert "\n" not in str(caught.value)


def test_an_embedded_model_is_not_pulled_when_told_not_to(model_cache: ModelCache) -> None:
    with pytest.raises(ModelNotFound, match="run `kvweave models pull smollm2`"):
        locate("smollm2", pull=False, cache=model_cache)
    assert not model_cache.root.exists()
