"""What every test may rely on: no hub, and subprocesses that find this checkout's package."""

import os
from pathlib import Path

import pytest

SRC = str(Path(__file__).resolve().parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SRC, os.environ.get("PYTHONPATH")]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Small products on two threads mostly wait for each other, worse when anything else runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def chat_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template; shared, so only for reading."""
    from worlds.tiny_models import make_chat_model_folder

    return make_chat_model_folder(tmp_path_factory.mktemp("chat"))
