"""One server for the tests that do not need one of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from kvweave.app import Weave
from serving import make_weave, serving


@pytest.fixture(scope="session")
def weave(chat_model_folder: Path) -> Weave:
    return make_weave(chat_model_folder)


@pytest.fixture(scope="session")
def url(weave: Weave) -> Iterator[str]:
    with serving(weave) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
