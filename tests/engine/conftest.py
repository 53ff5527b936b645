"""One tiny decoder for all tests of the engine."""

from pathlib import Path

import pytest

from engineworld import make_decoder
from kvweave.model.decoder import Decoder
from tiny_models import make_model_folder


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("engine")
    return make_decoder(make_model_folder(folder, "llama", max_position_embeddings=512))
