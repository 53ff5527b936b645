"""What every test may rely on: two threads, no network, a cache folder of its own if it asks."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def chat_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template; shared, so only for reading."""
    from tiny_models import make_chat_model_folder

    return make_chat_model_folder(tmp_path_factory.mktemp("chat"))
