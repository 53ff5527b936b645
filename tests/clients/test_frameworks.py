"""Unmodified clients of others against a real server, feature by feature: the table of
docs/clients.md. Each runs where its package is; `make test-clients` brings those that are not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvweave.app.weave import Weave
from kvweave.clients.server import ServerClient
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.serving import make_libraries, make_weave, serving
from worlds.tool_models import CALL, WIDTH, TellingDecoder, make_tool_model_folder
from worlds.weaves import plain_weave

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
ASKED = "How wide is a zorb?"


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> TellingDecoder:
    """A model whose template knows tools, and that says what it is told."""
    folder = make_tool_model_folder(tmp_path_factory.mktemp("tools"))
    return TellingDecoder(load_decoder(folder, device="cpu"), Tokenizer(folder))


@pytest.fixture(scope="module")
def tools_url(caller: TellingDecoder) -> Iterator[str]:
    with plain_weave(caller, caller.tokenizer) as weave, serving(weave) as address:
        yield address


def width_of(thing: str) -> str:
    """How wide a thing is."""
    return f"The {thing} is 14 cm wide."


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


def test_openai_tools(tools_url: str, caller: TellingDecoder) -> None:
    openai = pytest.importorskip("openai", reason="make test installs it")
    with openai.OpenAI(base_url=f"{tools_url}/v1", api_key="none") as client:
        messages: list[Any] = [{"role": "user", "content": ASKED}]
        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [WIDTH]}
        caller.tell(CALL)
        said = client.chat.completions.create(**asked).choices[0].message
        (call,) = said.tool_calls
        assert (call.function.name, call.function.arguments) == ("width_of", '{"thing": "zorb"}')
        messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "14 cm"}]
        caller.tell("It is 14 cm wide.")
        assert client.chat.completions.create(**asked).choices[0].message.content
        caller.tell(CALL)
        with client.chat.completions.stream(**asked) as stream:  # its helper adds the parts up
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls[0].function.name == "width_of"


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


def test_langchain_tools(tools_url: str, caller: TellingDecoder) -> None:
    langchain_openai = pytest.importorskip("langchain_openai", reason="make test installs it")
    from langchain_core.messages import HumanMessage, ToolMessage

    chat = langchain_openai.ChatOpenAI(base_url=f"{tools_url}/v1", api_key="none", model=MODEL)
    calling = chat.bind_tools([width_of])
    caller.tell(CALL)
    said = calling.invoke(ASKED)
    (call,) = said.tool_calls
    assert (call["name"], call["args"]) == ("width_of", {"thing": "zorb"})
    caller.tell("It is 14 cm wide.")
    result = ToolMessage(width_of(**call["args"]), tool_call_id=call["id"])
    assert calling.invoke([HumanMessage(ASKED), said, result]).content == "It is 14 cm wide."
    caller.tell(CALL)
    whole = None
    for chunk in calling.stream(ASKED):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [each["name"] for each in whole.tool_calls] == ["width_of"]


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


def test_llamaindex_tools(tools_url: str, caller: TellingDecoder) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like", reason="make test installs it")
    from llama_index.core.tools import FunctionTool

    llm = like.OpenAILike(
        api_base=f"{tools_url}/v1",
        api_key="none",
        model=MODEL,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    caller.tell(CALL)
    tool = FunctionTool.from_defaults(width_of)
    said = llm.chat_with_tools([tool], user_msg=ASKED)
    (call,) = llm.get_tool_calls_from_response(said)
    assert (call.tool_name, call.tool_kwargs) == ("width_of", {"thing": "zorb"})


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


def test_litellm_tools(tools_url: str, caller: TellingDecoder) -> None:
    litellm = pytest.importorskip("litellm", reason="make test-clients brings it")
    caller.tell(CALL)
    said = litellm.completion(
        model=f"openai/{MODEL}",
        api_base=f"{tools_url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": ASKED}],
        tools=[WIDTH],
    ).choices[0]
    assert said.finish_reason == "tool_calls"
    assert said.message.tool_calls[0].function.name == "width_of"


def test_llm_tools(
    tools_url: str, caller: TellingDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = pytest.importorskip("llm", reason="make test-clients brings it")
    lines = f"- model_id: caller\n  model_name: {MODEL}\n  api_base: {tools_url}/v1\n"
    lines += "  api_key_name: k\n  supports_tools: true\n"
    (tmp_path / "extra-openai-models.yaml").write_text(lines)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    caller.tell(CALL)
    reply = llm.get_model("caller").prompt(ASKED, key="none", tools=[width_of], stream=False)
    (call,) = reply.tool_calls()
    assert (call.name, call.arguments) == ("width_of", {"thing": "zorb"})


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
