"""One vLLM for most tests, and what kvweave itself makes of the same prompts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.model.files.locate import locate
from kvweave.text.tokenizer import Tokenizer
from worlds.vllm_server import VllmServer, running_vllm


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return locate("smollm2")


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer(smollm2)


@pytest.fixture(scope="session")
def vllm(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Eager; chunk KV as computed, made only where a request asks for it."""
    with running_vllm(tmp_path_factory.mktemp("vllm"), smollm2) as server:
        yield server
