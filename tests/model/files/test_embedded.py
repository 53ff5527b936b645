"""Pulling: the real pip, a wheel made by hand, and every way it can go wrong."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.errors import ModelCorrupt, ModelNotFound
from kvweave.model.files.embedded import EMBEDDED, GGUF_FILE, EmbeddedModel, pull
from kvweave.model.files.hub_file import HubFile
from kvweave.model.files.model_cache import ModelCache, PullStep
from kvweave.model.files.wheels import JoinedWheels
from worlds.gguf_files import gguf_of
from worlds.tiny_models import make_model_folder
from worlds.wheels import FOLDER, index, make_parts, make_wheel

__all__ = ["index"]  # the fixture

# pulls the model described in argv[1]; at the argv[3]-th report of stage argv[2] it kills itself
CHILD = """
import json, os, pickle, signal, sys
from kvweave.model.files.embedded import pull
model = pickle.loads(bytes.fromhex(sys.argv[1]))
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
        [sys.executable, "-c", CHILD, pickle.dumps(model).hex(), die_at, str(nth)],
        env=os.environ | {"PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
    )


def leftovers(model_cache: ModelCache) -> list[str]:
    """What lies in the cache, without locks and empty folders."""
    files = [p.relative_to(model_cache.root) for p in model_cache.root.rglob("*") if p.is_file()]
    return sorted({path.parts[0] for path in files if path.parts[0] != ".locks"})


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
    folder = pull(make_parts(index, gguf), cache=model_cache)
    assert read_spec(folder) == read_spec(source)
    assert (folder / GGUF_FILE).read_bytes() == gguf
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["temperature"] == 0.25
    assert "eos_token_id" in generation, "what the file itself says stays"
    assert leftovers(model_cache) == ["tiny-1.0"]


def test_another_way_to_draw_answers_makes_the_folder_anew(
    index: Path, model_cache: ModelCache, tmp_path: Path
) -> None:
    source = make_model_folder(tmp_path, "llama", vocab_size=320)
    model = make_parts(index, gguf_of(tmp_path / "model.gguf", source).read_bytes())
    pull(model, cache=model_cache)
    folder = pull(replace(model, generation={"temperature": 0.5}), cache=model_cache)
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.5


def test_a_wrong_checksum_is_refused_and_nothing_stays(
    index: Path, model_cache: ModelCache
) -> None:
    model = replace(make_wheel(index), sha256="0" * 64)
    with pytest.raises(ModelCorrupt, match=r"tiny: tiny-box.* expected 0{16}…; it was not kept"):
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
    model = make_parts(index, b"GGUF\3\0\0\0")
    with pytest.raises(ModelCorrupt, match="ends at byte 8"):
        pull(model, cache=model_cache)
    assert leftovers(model_cache) == []


def test_a_wheel_nobody_has_says_what_pip_said(index: Path, model_cache: ModelCache) -> None:
    model = make_wheel(index)
    (index / "tiny_box-1.0-py3-none-any.whl").rename(index / "tiny_box-0.9-py3-none-any.whl")
    with pytest.raises(
        ModelNotFound, match=r"tiny-box==1\.0: No matching distribution.*pip config"
    ):
        pull(model, cache=model_cache)
    assert leftovers(model_cache) == []


def test_members_cannot_climb_out_of_the_folder(index: Path, model_cache: ModelCache) -> None:
    model = replace(make_wheel(index), members=("../../escape",))
    with pytest.raises(AssertionError):
        pull(model, cache=model_cache)
    assert model_cache.list() == []
    assert not list(model_cache.root.parent.rglob("escape"))


@pytest.mark.parametrize("stage", ["downloading", "checking", "unpacking", "converting"])
def test_a_killed_pull_leaves_nothing_present_and_the_next_one_works(
    stage: str, index: Path, model_cache: ModelCache, tmp_path: Path
) -> None:
    source = make_model_folder(tmp_path, "llama", vocab_size=320)
    gguf = gguf_of(tmp_path / "model.gguf", source).read_bytes()
    model = make_parts(index, gguf)
    process = child(model, die_at=stage)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert model_cache.list() == []
    assert all(name.startswith((".making-", ".downloads")) for name in leftovers(model_cache))
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


def test_the_pieces_of_a_file_are_in_the_order_of_their_numbers() -> None:
    cut = [m for m in EMBEDDED.values() if len(m.sources) > 1]
    assert [model.name for model in cut] == ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
    for model, count in zip(cut, (6, 22), strict=True):
        hub, wheels = model.sources
        assert isinstance(hub, HubFile)
        assert isinstance(wheels, JoinedWheels)
        numbers = [re.findall(r"part(\d+)", p.wheel.name + " " + p.member) for p in wheels.parts]
        expected = [[str(n), str(n), f"{n:02}"] for n in range(1, count + 1)]
        assert numbers == expected
        assert len({part.wheel.sha256 for part in wheels.parts}) == count
