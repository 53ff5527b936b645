"""One engine in this process, and a gateway over it, for tests that need no others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.app.weave import Weave
from worlds.gateways import GatewayWorld, gateway_over
from worlds.serving import KbServer, make_libraries, make_weave, serving


@pytest.fixture(scope="module", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured of this machine stays out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVWEAVE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def engine(chat_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KbServer]:
    """A server that is an upstream, and is asked directly to compare."""
    with make_weave(chat_model_folder) as weave:
        root = tmp_path_factory.mktemp("engine-kbs")
        libraries = make_libraries(weave, root)
        with serving(weave, libraries=libraries) as url:
            yield KbServer(url, weave, libraries, root)
        libraries.close()


@pytest.fixture(scope="session")
def weave(engine: KbServer) -> Weave:
    return engine.weave


@pytest.fixture(scope="session")
def front(
    engine: KbServer, chat_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayWorld]:
    """A gateway that has the model's tokenizer."""
    root = tmp_path_factory.mktemp("gateway-kbs")
    with gateway_over([engine.url], root, tokenizer=chat_model_folder) as world:
        yield world
