"""The web page in a real browser: `make test-ui`.

Two servers: `tiny`, a random model that babbles at once, for everything that needs no sense;
`real`, the embedded SmolLM2 over the sample corpus, as people start it.
"""

import importlib.util
import random
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from kvweave.app.library.library_kv import BackgroundKV
from kvweave.demo import PASSAGES
from worlds.browsing import PATIENCE_MS, Visiting, running_browser, visiting
from worlds.page_servers import NOTES, VALLEY, RealServer, answered, bring
from worlds.serving import KbServer, make_libraries, make_weave, serving
from worlds.tiny_models import make_chat_model_folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser

if importlib.util.find_spec("playwright") is None:  # the plain suite has none and runs none of this
    collect_ignore_glob = ["test_*.py"]

NO_MODEL = "smollm2 and minilm are not on this machine; run: make models"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker("ui")


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE_MS)
    with running_browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def visit(browser: "Browser") -> Visiting:
    """`with visit(url) as v`: a fresh profile. It is checked that nothing leaves the origin and
    that neither scripts nor the policy complain."""
    return partial(visiting, browser)


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Models of the user's cache; profiles and knowledge bases of our own."""
    from kvweave.paths import home

    models = home() / "models"
    own = tmp_path_factory.mktemp("home")
    if models.is_dir():
        (own / "models").symlink_to(models.resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVWEAVE_HOME", str(own))
        yield own


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KbServer]:
    """A random model with room for 8,192 tokens, and no knowledge base yet."""
    folder = make_chat_model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)
    weave, root = make_weave(folder), tmp_path_factory.mktemp("kbs")
    libraries = make_libraries(weave, root, BackgroundKV())
    with serving(weave, libraries=libraries) as address:
        yield KbServer(address, weave, libraries, root)
    libraries.close()


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    from kvweave.model.files.embedded import EMBEDDED, peek
    from kvweave.model.files.model_cache import ModelCache

    for name in ("smollm2", "minilm"):
        assert peek(EMBEDDED[name], ModelCache()) is not None, NO_MODEL
    with ExitStack() as stack:
        server = RealServer(tmp_path_factory.mktemp("real"))
        stack.callback(server.close)
        server.start()
        yield server


@pytest.fixture(scope="session")
def sampled(real: RealServer) -> RealServer:
    """The real server with a few passages of the sample as the knowledge base `valley`, and their
    KV."""
    files = [("file", (f"{name}.md", (PASSAGES / f"{name}.md").read_bytes())) for name in VALLEY]
    url, wait = f"{real.url}/v1/kb/valley/documents", {"wait_for_kv": True}
    httpx.post(url, files=files, params=wait, timeout=280).raise_for_status()
    return real


@pytest.fixture
def empty(tiny: KbServer, tmp_path: Path) -> Iterator[KbServer]:
    """A server of its own over the same model, with no knowledge base."""
    libraries = make_libraries(tiny.weave, tmp_path / "kbs", BackgroundKV())
    with serving(tiny.weave, libraries=libraries) as address:
        yield KbServer(address, tiny.weave, libraries, tmp_path / "kbs")
    libraries.close()


@pytest.fixture(scope="session")
def notes(tiny: KbServer) -> str:
    """The knowledge base `notes` of `tiny`: three documents, with KV."""
    for title, text in NOTES.items():
        bring(tiny.url, "notes", title, text)
    return "notes"


@pytest.fixture(scope="session")
def fused(tiny: KbServer, notes: str) -> str:
    """The id of an answer by fusion of the chunks of `notes`."""
    reuse = {"strategy": "weave", "ratio": 0.3}
    return str(answered(tiny.url, kb=notes, k=3, reuse=reuse)["id"])


@pytest.fixture(scope="session")
def long_answer(tiny: KbServer) -> str:
    """The id of an answer to a prompt of more than 4,000 tokens, most of them reused."""
    words = " ".join(NOTES.values()).split()
    draw = random.Random(0)
    for number in range(24):
        text = " ".join(draw.choices(words, k=130))
        bring(tiny.url, "long", f"Passage {number}", f"{text}.")
    reuse = {"strategy": "weave", "ratio": 0.15}
    reply = answered(tiny.url, kb="long", k=24, reuse=reuse, max_tokens=4)
    assert reply["usage"]["prompt_tokens"] >= 4000, reply["usage"]
    return str(reply["id"])
