"""Unmodified clients of others against a real server, feature by feature: the table of
docs/clients.md. Each runs where its package is; `make test-clients` brings those that are not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvweave.app.weave import Weave
from kvweave.clients.server import ServerClient
from worlds.serving import make_libraries, make_weave, serving

pytestmark = pytest.mark.filterwarnings("ignore")  # of their packages
ZORB = "A zorb is a small round tool. It is 14 cm wide."


@pytest.fixture(scope="module")
def weave(chat_model_folder: Path) -> Weave:
    return make_weave(chat_model_folder)


@pytest.fixture(scope="module")
def url(weave: Weave, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    libraries = make_libraries(weave, tmp_path_factory.mktemp("kbs"))
    with serving(weave, libraries=libraries) as address:
        client = ServerClient(address)
        client.upload_text("notes", "Zorbs", ZORB, metadata={"kind": "tool"})
        client.upload_text("notes", "Quotas", "A quota limits pods.", metadata={"kind": "rule"})
        yield address
    libraries.close()


MODEL, KB_MODEL = "tiny", "tiny@notes"


# ── openai ────────────────────────────────────────────────────────────────────


def test_openai_chat_stream_kb_models_and_embeddings(url: str) -> None:
    openai = pytest.importorskip("openai", reason="make test installs it")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "How wide?"}]}
        whole = client.chat.completions.create(model=KB_MODEL, max_tokens=4, **asked)
        assert whole.choices[0].message.content
        assert whole.sources[0]["title"] in ("Zorbs", "Quotas")
        assert whole.usage.prompt_tokens_details.cached_tokens >= 0
        chunks = client.chat.completions.create(model=MODEL, max_tokens=4, stream=True, **asked)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert KB_MODEL in [model.id for model in client.models.list()]
        vectors = client.embeddings.create(model="words", input=["zorb", "quota"])
        assert len(vectors.data) == 2


# ── LangChain ─────────────────────────────────────────────────────────────────


def test_langchain_chat_stream_and_kb(url: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai", reason="make test installs it")
    chat = langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=KB_MODEL, max_tokens=4
    )
    assert chat.invoke("How wide is a zorb?").content
    assert "".join(str(chunk.content) for chunk in chat.stream("How wide is a zorb?"))


def test_langchain_embeddings(url: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai", reason="make test installs it")
    embeddings = langchain_openai.OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="none", model="words", check_embedding_ctx_length=False
    )
    assert len(embeddings.embed_documents(["zorb", "quota"])) == 2
    assert len(embeddings.embed_query("zorb")) == 64


def test_langchain_retriever(url: str) -> None:
    pytest.importorskip("langchain_core", reason="make test installs it")
    from kvweave.clients.langchain import KVWeaveRetriever

    retriever = KVWeaveRetriever(url=url, kb="notes", k=2, retrieval="hybrid")
    found = retriever.invoke("How wide is a zorb?")
    assert found[0].metadata["title"] == "Zorbs"
    assert "14 cm wide" in found[0].page_content
    one = KVWeaveRetriever(url=url, kb="notes", filter={"kind": "rule"}).invoke("zorb")
    assert [document.metadata["title"] for document in one] == ["Quotas"]


# ── LlamaIndex ────────────────────────────────────────────────────────────────


def test_llamaindex_chat_stream_and_kb(url: str) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like", reason="make test installs it")
    llm = like.OpenAILike(
        api_base=f"{url}/v1", api_key="none", model=KB_MODEL, is_chat_model=True, max_tokens=4
    )
    assert llm.complete("How wide is a zorb?").text
    assert [chunk.delta for chunk in llm.stream_complete("How wide is a zorb?")]


def test_llamaindex_retriever(url: str) -> None:
    pytest.importorskip("llama_index.core", reason="make test installs it")
    from kvweave.clients.llamaindex import KVWeaveNodeRetriever

    retriever = KVWeaveNodeRetriever(url, "notes", 2, filter={"kind": "tool"})
    (found,) = retriever.retrieve("How wide is a zorb?")
    assert found.node.metadata["title"] == "Zorbs"
    assert found.score is not None


# ── litellm, llm ──────────────────────────────────────────────────────────────


def test_litellm_chat_stream_and_kb(url: str) -> None:
    litellm = pytest.importorskip("litellm", reason="make test-clients brings it")
    asked: dict[str, Any] = {
        "model": f"openai/{KB_MODEL}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "How wide is a zorb?"}],
        "max_tokens": 4,
    }
    assert litellm.completion(**asked).choices[0].message.content
    pieces = litellm.completion(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
    vectors = litellm.embedding(
        model="openai/words", input=["zorb"], api_base=f"{url}/v1", api_key="none"
    )
    assert len(vectors.data) == 1


def test_llm_chat_and_kb(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simon Willison's command line, by its own file of models."""
    llm = pytest.importorskip("llm", reason="make test-clients brings it")
    lines = (
        f"- model_id: notes\n  model_name: {KB_MODEL}\n  api_base: {url}/v1\n  api_key_name: k\n"
    )
    (tmp_path / "extra-openai-models.yaml").write_text(lines)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    model = llm.get_model("notes")
    reply = model.prompt("How wide is a zorb?", key="none", max_tokens=4, stream=False)
    assert reply.text()
    assert "".join(model.prompt("How wide is a zorb?", key="none", max_tokens=4))
