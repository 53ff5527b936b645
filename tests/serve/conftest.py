"""One server for the tests that do not need one of their own, and one with knowledge bases."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from kvweave.app.weave import Weave
from worlds.serving import KbServer, make_libraries, make_weave, serving


@pytest.fixture(scope="module", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured of this machine stays out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVWEAVE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


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


@pytest.fixture(scope="session")
def kb_server(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KbServer]:
    root = tmp_path_factory.mktemp("kbs")
    libraries = make_libraries(weave, root)
    with serving(weave, libraries=libraries) as address:
        yield KbServer(address, weave, libraries, root)
    libraries.close()
