"""One tiny decoder for all tests of the engine, and a world of stored chunks over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from worlds.engine import make_decoder
from worlds.fused import World
from worlds.mean_drift import move_by_the_mean
from worlds.tiny_models import make_model_folder


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("engine")
    return make_decoder(make_model_folder(folder, "llama", max_position_embeddings=512))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    """The same in float64, where no two logits are close, and in float32, which can be stored."""
    root = tmp_path_factory.mktemp("joined")
    folder = make_model_folder(root, "llama", max_position_embeddings=512)
    return make_decoder(folder), load_decoder(folder, device="cpu")


@pytest.fixture
def world(models: tuple[Decoder, Decoder], tmp_path: Path) -> Iterator[World]:
    world = World(models[0], tmp_path, models[1])
    yield world
    world.store.close()


@pytest.fixture
def by_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies drift as shared chunks are seen to."""
    move_by_the_mean(monkeypatch)
