"""What one server leaves to the next is bounded, and is met once."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

import pytest

from kvweave.app.weave import Sampling, Weave
from kvweave.engine import left_prefixes
from kvweave.serve.kept import KeptStart
from worlds.serving import make_weave

NAMES = ("one", "two")
DOCUMENTS = [f"To drain node {n}, cordon it and evict each of its pods." for n in range(4)]


class Place:
    """Of a server with its keeper, which says nothing."""

    def __init__(self, memory: BinaryIO) -> None:
        self._memory = memory
        ours, theirs = socket.socketpair()
        theirs.detach()  # it stays open: a process whose keeper goes is ended
        self.kept = KeptStart(ours, ours, memory.fileno(), 1)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._memory.fileno()).st_size

    def cut_off(self, num_bytes: int) -> None:
        self._memory.truncate(self.num_bytes - num_bytes)


@pytest.fixture
def place() -> Iterator[Place]:
    with TemporaryFile() as memory:
        yield Place(memory)


@pytest.fixture
def models(chat_model_folder: Path) -> Iterator[Sequence[Weave]]:
    with ExitStack() as stack:
        yield [stack.enter_context(make_weave(chat_model_folder, name=each)) for each in NAMES]


def lose(models: Sequence[Weave]) -> None:
    """Lose the engines, once they have answered."""
    for each in models:
        each.ask("What is it?", documents=DOCUMENTS, sampling=Sampling(max_tokens=1))
        each.engine.abandon("lost")


def test_what_is_left_is_found_once(
    place: Place,
    models: Sequence[Weave],
    chat_model_folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    lose(models)
    place.kept.leave(models)
    with (
        make_weave(chat_model_folder, name="one") as one,
        make_weave(chat_model_folder, name="two") as two,
    ):
        place.kept.take([one, two])
        assert capfd.readouterr().err.count("chunks is back") == 2
        assert place.num_bytes == 0


def test_what_cannot_be_read_is_met_once(
    place: Place,
    models: Sequence[Weave],
    chat_model_folder: Path,
) -> None:
    lose(models)
    place.kept.leave(models[:1])
    place.cut_off(40)
    with make_weave(chat_model_folder, name="one") as fresh:
        place.kept.take([fresh])
    with pytest.raises((ValueError, OSError)):
        place.kept.raise_not_taken()
    assert place.num_bytes == 0


def test_all_models_have_one_bound_and_leave_memory_free(
    place: Place, models: Sequence[Weave], monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(models)
    place.kept.leave(models[:1])
    of_one = place.num_bytes
    monkeypatch.setattr(left_prefixes, "MOST_BYTES", of_one)
    place.kept.leave(models)
    of_both = place.num_bytes
    assert of_one <= of_both < 1.2 * of_one
    monkeypatch.setattr(left_prefixes, "free_bytes", lambda: of_one // 2)
    place.kept.leave(models)
    assert place.num_bytes < 0.5 * of_one
