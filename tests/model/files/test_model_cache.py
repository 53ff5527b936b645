"""The model cache holds whole folders or nothing, whatever happens while one is made."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvweave.errors import ModelError
from kvweave.model.files.model_cache import CacheOrigin, ModelCache, PullStep


def make_origin(sha256: str = "aa", converter: int = 1) -> CacheOrigin:
    return CacheOrigin("toy", "a toy", "nowhere", "MIT", sha256, converter)


def filling(text: str = "weights") -> Callable[[Path, Path], None]:
    def fill(folder: Path, scratch: Path) -> None:
        (scratch / "litter").write_text("gone afterwards")
        folder.mkdir()
        (folder / "model.safetensors").write_text(text)

    return fill


def ignore(step: PullStep) -> None: ...


@pytest.fixture
def model_cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "models")


def visible(model_cache: ModelCache) -> list[str]:
    return sorted(p.name for p in model_cache.root.iterdir() if p.name != ".locks")


def test_a_made_folder_is_found_again_with_its_origin(model_cache: ModelCache) -> None:
    assert model_cache.list() == []
    path = model_cache.make("toy-1", make_origin(), filling(), ignore)
    found = model_cache.peek("toy-1")
    assert found is not None
    assert (found.path, found.origin, found.size_bytes) == (path, make_origin(), 7)
    assert [s.path for s in model_cache.list()] == [path]
    assert visible(model_cache) == ["toy-1"]


def test_what_is_there_is_not_made_again(model_cache: ModelCache) -> None:
    model_cache.make("toy-1", make_origin(), filling("first"), ignore)
    path = model_cache.make("toy-1", make_origin(), filling("second"), ignore)
    assert (path / "model.safetensors").read_text() == "first"


@pytest.mark.parametrize("changed", [make_origin(sha256="bb"), make_origin(converter=2)])
def test_another_origin_replaces_the_folder(model_cache: ModelCache, changed: CacheOrigin) -> None:
    model_cache.make("toy-1", make_origin(), filling("first"), ignore)
    path = model_cache.make("toy-1", changed, filling("second"), ignore)
    assert (path / "model.safetensors").read_text() == "second"
    assert visible(model_cache) == ["toy-1"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing_behind(model_cache: ModelCache, error: BaseException) -> None:
    def fail(folder: Path, scratch: Path) -> None:
        filling()(folder, scratch)
        raise error

    with pytest.raises(type(error)):
        model_cache.make("toy-1", make_origin(), fail, ignore)
    assert visible(model_cache) == []
    assert model_cache.list() == []


def test_a_full_disk_is_one_line_with_a_way_out(model_cache: ModelCache) -> None:
    def fail(folder: Path, scratch: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match=r"toy: cannot change .*: No space left.* KVWEAVE_HOME"):
        model_cache.make("toy-1", make_origin(), fail, ignore)


@pytest.mark.parametrize("damage", ["cut", "lost", "no manifest", "bad manifest", "odd manifest"])
def test_a_damaged_folder_is_not_there_and_is_made_again(
    model_cache: ModelCache, damage: str
) -> None:
    path = model_cache.make("toy-1", make_origin(), filling(), ignore)
    match damage:
        case "cut":
            (path / "model.safetensors").write_text("weig")
        case "lost":
            (path / "model.safetensors").unlink()
        case "no manifest":
            (path / "manifest.json").unlink()
        case "bad manifest":
            (path / "manifest.json").write_text("{")
        case "odd manifest":
            (path / "manifest.json").write_text(json.dumps([1, 2]))
    assert model_cache.peek("toy-1") is None
    assert model_cache.list() == []
    model_cache.make("toy-1", make_origin(), filling(), ignore)
    assert model_cache.peek("toy-1") is not None


def test_litter_of_a_dead_maker_is_swept_up(model_cache: ModelCache) -> None:
    (model_cache.root / ".making-toy-1-dead" / "folder").mkdir(parents=True)
    (model_cache.root / ".making-other-1-alive").mkdir()
    model_cache.make("toy-1", make_origin(), filling(), ignore)
    assert visible(model_cache) == [".making-other-1-alive", "toy-1"]


def test_two_makers_at_once_do_the_work_once(model_cache: ModelCache) -> None:
    inside, go = threading.Event(), threading.Event()
    calls: list[str] = []
    waited: list[PullStep] = []

    def slow(folder: Path, scratch: Path) -> None:
        calls.append("slow")
        inside.set()
        assert go.wait(20)
        filling()(folder, scratch)

    def report(step: PullStep) -> None:
        waited.append(step)
        go.set()

    first = threading.Thread(target=model_cache.make, args=("toy-1", make_origin(), slow, ignore))
    first.start()
    assert inside.wait(20)
    path = model_cache.make("toy-1", make_origin(), filling("other"), report)
    first.join()
    assert (path / "model.safetensors").read_text() == "weights"
    assert [step.what for step in waited] == ["waiting for another kvweave's"]
    assert calls == ["slow"]


def test_removing_says_whether_there_was_anything(model_cache: ModelCache) -> None:
    model_cache.make("toy-1", make_origin(), filling(), ignore)
    assert model_cache.remove("toy-1")
    assert not model_cache.remove("toy-1")
    assert visible(model_cache) == []
