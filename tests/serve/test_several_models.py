"""Several models in one server: each by its name, with an engine and KV of its own."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from kvweave.app.libraries.libraries import Libraries, LibrariesConfig
from kvweave.app.library.library_kv import KVOptions
from kvweave.app.model_set import ModelSet
from kvweave.app.weave import Sampling
from kvweave.calibrate.profiles import LayerProfile, Profile, save_profile, user_path
from kvweave.config import EngineSettings, ModelChoice, WeaveConfig
from kvweave.errors import ConfigError
from worlds.serving import make_weave, serving, user
from worlds.tiny_corpus import WordEmbedder
from worlds.tiny_models import make_chat_model_folder, make_model_folder, make_tokenizer_files

ZORB = {"title": "Zorbs", "text": "A zorb is a small round tool. It is 14 cm wide."}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
LAYERS = LayerProfile(
    4, 2000.5, (0.1, 0.3), (0.0, 0.2), (0.2, 0.4), (1, 0), (0.3, 0.31), 0.25, 0.35, (1,)
)
PROFILED = "qcfuse"  # a strategy that looks at the layers of a model's profile


@pytest.fixture(scope="module")
def folders(chat_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models with one tokenizer, and one with another."""
    root = tmp_path_factory.mktemp("models")
    other = root / "apart" / "llama"
    size = make_tokenizer_files(other, "A quite other text, of other words. " * 3).get_vocab_size()
    ids = {"bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": 512}
    made = make_model_folder(root / "apart", "llama", seed=2, vocab_size=size, **ids)
    assert made == other
    return {
        "tiny": chat_model_folder,
        "twin": make_chat_model_folder(root / "twin", seed=1),
        "apart": other,
    }


@pytest.fixture(scope="module")
def models(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelSet]:
    """The layers of `twin` were measured; the profile of `tiny` has layers that it has not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVWEAVE_HOME", str(tmp_path_factory.mktemp("home")))
        made = ModelSet([make_weave(folder, name=name) for name, folder in folders.items()])
        for name, layers in (("twin", LAYERS), ("tiny", replace(LAYERS, critical=(99,)))):
            runtime = made.weave_for(name).runtime
            weights = runtime.decoder.weights.fingerprint
            profile = Profile(name, weights, runtime.tokenizer.fingerprint, layers)
            save_profile(user_path(weights), profile)
        yield made
        made.close()


@pytest.fixture(scope="module")
def libraries(models: ModelSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Libraries]:
    root = tmp_path_factory.mktemp("kbs")
    config = LibrariesConfig(root=root, embedder="words", kv=KVOptions("isolated"))
    made = Libraries(models, config, open_embedder=lambda name: WordEmbedder())
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(models: ModelSet, libraries: Libraries) -> Iterator[OpenAI]:
    with (
        serving(models, libraries=libraries) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        made.post("/kb/notes/documents", body=ZORB, cast_to=httpx.Response)
        yield made


def told(client: OpenAI, what: str, status: int = 200, **query: Any) -> Any:
    reply = httpx.get(f"{client.base_url}{what}", params=query, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def compared(client: OpenAI, status: int = 200, **fields: Any) -> list[dict[str, Any]]:
    """The events of a comparison, or what is wrong with it."""
    body = {"messages": user("How wide is a zorb?"), "max_tokens": 6, **fields}
    body.setdefault("ways", [{"reuse": "full"}, {"reuse": "reuse"}])
    reply = httpx.post(f"{client.base_url}compare", json=body, timeout=60)
    assert reply.status_code == status, reply.text
    if status != 200:
        return [reply.json()["error"]]
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def said(client: OpenAI, model: str, question: str = "How wide?") -> Any:
    return client.chat.completions.create(model=model, messages=user(question), **GREEDY)


def test_a_request_is_answered_by_the_model_it_names(client: OpenAI, models: ModelSet) -> None:
    texts = {}
    for weave in models.engines:
        name = weave.model_name
        reply = said(client, name)
        assert reply.model == name
        texts[name] = reply.choices[0].message.content
        alone = weave.chat(user("How wide?"), sampling=Sampling(max_tokens=6)).finish()
        assert texts[name] == alone.text
    assert len(set(texts.values())) == 3, "they are different models"
    first = httpx.post(
        f"{client.base_url}chat/completions",
        json={"messages": user("How wide?"), **GREEDY},
        timeout=60,
    ).json()
    assert first["model"] == "tiny"
    assert first["choices"][0]["message"]["content"] == texts["tiny"]
    plain = client.completions.create(model="twin", prompt="Drain the", **GREEDY)
    assert plain.model == "twin"


def test_the_list_has_all_models_and_what_each_answers_from(client: OpenAI) -> None:
    kinds = {card.id: card.kind for card in client.models.list()}  # type: ignore[attr-defined]
    assert list(kinds)[:3] == ["tiny", "twin", "apart"]
    assert [name for name, kind in kinds.items() if kind == "kb"] == ["tiny@notes", "twin@notes"]
    assert client.models.retrieve("twin@notes").id == "twin@notes"
    with pytest.raises(openai.NotFoundError, match="no model 'nobody' here; this server has"):
        said(client, "nobody")


def test_models_of_one_tokenizer_answer_from_one_knowledge_base(client: OpenAI) -> None:
    replies = [said(client, f"{name}@notes", "How wide is a zorb?") for name in ("tiny", "twin")]
    assert [reply.sources[0]["title"] for reply in replies] == ["Zorbs", "Zorbs"]
    assert len({reply.choices[0].message.content for reply in replies}) == 2
    with pytest.raises(openai.BadRequestError) as seen:
        said(client, "apart@notes")
    assert "'notes' was cut with another tokenizer than that of 'apart'" in str(seen.value)
    assert "ask 'tiny' or 'twin'" in str(seen.value)


def test_what_is_removed_is_gone_for_all_of_them(client: OpenAI) -> None:
    client.post("/kb/going/documents", body=ZORB, cast_to=httpx.Response)
    for name in ("tiny", "twin"):
        assert said(client, f"{name}@going", "How wide is a zorb?").sources
    listed = httpx.get(f"{client.base_url}kb/going/documents", timeout=60).json()
    where = f"{client.base_url}kb/going/documents/{listed['data'][0]['id']}"
    assert httpx.delete(where, timeout=60).status_code == 200
    for name in ("tiny", "twin"):
        reply = said(client, f"{name}@going", "How wide is a zorb?")
        assert (reply.sources, reply.nothing_found) == ([], True)
    assert httpx.delete(f"{client.base_url}kb/going", timeout=60).status_code == 200


def test_no_exact_kv_goes_from_one_model_to_another(client: OpenAI) -> None:
    question = "Tell me all about the quick brown fox, and then about the lazy dog. " * 3
    for name in ("tiny", "twin"):
        first, second = (said(client, name, question).usage for _ in range(2))
        assert first.prompt_tokens_details.cached_tokens == 0
        assert second.prompt_tokens_details.cached_tokens > 0


def test_answers_of_each_can_be_looked_at(client: OpenAI) -> None:
    ids = {name: said(client, name).id for name in ("tiny", "twin")}
    found = {
        name: httpx.get(f"{client.base_url}answers/{ids[name]}", timeout=60).json()["model"]
        for name in ids
    }
    assert found == {"tiny": "tiny", "twin": "twin"}


def test_load_tree_and_quality_are_told_of_the_model_that_is_named(client: OpenAI) -> None:
    question = "Tell me all about the slow red hen, and then about the busy bee. " * 3
    said(client, "twin", question)
    trees = {name: told(client, "tree", model=name)["nodes"] for name in ("tiny", "twin", "apart")}
    assert told(client, "tree")["nodes"] == trees["tiny"]
    ids = {name: {node["id"] for node in nodes} for name, nodes in trees.items()}
    assert ids["twin"] - ids["tiny"], "what twin alone was asked"
    assert told(client, "quality", model="twin")["model"] == "twin"
    assert told(client, "quality")["model"] == "tiny"
    assert told(client, "stats", model="apart")["now"]["pages"]["total"] > 0
    assert told(client, "stats", 404, model="other")["error"]["code"] == "model_not_found"


def test_quality_over_a_knowledge_base_is_of_the_model_that_is_named(client: OpenAI) -> None:
    assert told(client, "quality", kb="notes")["model"] == "tiny"
    assert told(client, "quality", kb="notes", model="twin")["model"] == "twin"
    refused = told(client, "quality", 400, kb="notes", model="apart")["error"]["message"]
    assert "ask 'tiny' or 'twin'" in refused


def test_tiers_are_those_of_the_model_that_is_named(client: OpenAI) -> None:
    url = f"{client.base_url}kb/tiers/documents"
    assert httpx.post(url, params={"wait_for_kv": True}, json=ZORB, timeout=60).status_code == 200

    def in_memory(model: str) -> list[int]:
        tiers = told(client, "stats", model=model)["tiers"]
        return [each["bytes"] for each in tiers if (each["kb"], each["tier"]) == ("tiers", "host")]

    (own,) = in_memory("tiny")
    assert own > 0
    assert in_memory("twin") == [], "it has not opened it"
    told(client, "quality", kb="tiers", model="twin")
    assert in_memory("twin") == [0], "now it has; what was made is the first's"
    assert httpx.delete(f"{client.base_url}kb/tiers", timeout=60).status_code == 200


def test_ways_are_compared_with_the_model_that_is_named(client: OpenAI) -> None:
    for fields in ({"model": "twin", "kb": "notes"}, {"model": "twin@notes"}):
        done = [event["done"] for event in compared(client, **fields) if "done" in event]
        full = said(client, "twin@notes", "How wide is a zorb?")
        assert done[0]["answer"] == full.choices[0].message.content
        assert [told(client, f"answers/{each['id']}")["model"] for each in done] == ["twin"] * 2
    usual = [event["done"] for event in compared(client, kb="notes") if "done" in event]
    assert told(client, f"answers/{usual[0]['id']}")["model"] == "tiny"
    documents = [{"text": ZORB["text"]}]
    events = compared(client, model="apart", documents=documents)
    assert [event["way"] for event in events if "quality" in event] == [0, 1]
    (unknown,) = compared(client, 404, model="nobody", kb="notes")
    assert unknown["code"] == "model_not_found"
    (differ,) = compared(client, 400, model="tiny@notes", kb="going")
    assert "'tiny@notes' and 'kb' 'going' differ" in differ["message"]
    (unfit,) = compared(client, 400, model="apart@notes")
    assert "ask 'tiny' or 'twin'" in unfit["message"]


def test_a_strategy_is_refused_by_the_model_that_is_not_ready_for_it(client: OpenAI) -> None:
    ways = {
        each["name"]: [way["name"] for way in each["strategies"]]
        for each in told(client, "info")["models"]
    }
    assert [name for name in ways if PROFILED in ways[name]] == ["twin", "apart"]
    (tiny, *others) = told(client, "info")["models"]
    refused = {each["name"]: each["why"] for each in tiny["refused"]}
    assert "kvweave calibrate layers" in refused[PROFILED]
    assert [each["refused"] for each in others] == [[], []]
    for over in ({"kb": "notes"}, {"documents": [{"text": ZORB["text"]}]}):
        asked = {"ways": [{"reuse": "full"}, {"reuse": PROFILED}], **over}
        (refused,) = compared(client, 400, model="tiny", **asked)
        assert "kvweave calibrate" in refused["message"]
        events = compared(client, model="twin", **asked)
        assert [event["way"] for event in events if "quality" in event] == [0, 1]


def test_the_page_hears_of_all_models_and_what_each_answers_from(client: OpenAI) -> None:
    info = told(client, "info")
    models = info["models"]
    assert [each["name"] for each in models] == ["tiny", "twin", "apart"]
    for field in ("context", "dial", "strategies"):
        assert models[0][field] == info[field]
    assert {each["context"] for each in models} == {512}
    assert told(client, "kb/notes")["models"] == ["tiny", "twin"]


def test_two_models_of_one_name_are_refused(folders: dict[str, Path]) -> None:
    weave = make_weave(folders["tiny"])
    with pytest.raises(ConfigError, match="two models have the same name: tiny, tiny"):
        ModelSet([weave, weave])
    weave.close()


def test_memory_is_divided_and_too_little_of_it_is_said_before_loading(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WeaveConfig(ModelChoice(device="cpu"), engine=EngineSettings(page_tokens=16))
    names = [str(folders["tiny"]), str(folders["twin"])]
    free = iter([10**9, 100])
    monkeypatch.setattr("kvweave.app.model_set.free_bytes", lambda: next(free))
    with pytest.raises(
        ConfigError, match=r"needs at least .* GB for its weights beside llama, and"
    ):
        ModelSet.from_config(config, names)
    monkeypatch.undo()
    apart = [str(folders["tiny"]), str(folders["apart"])]
    with pytest.raises(ConfigError, match="two models have the same name: llama, llama"):
        ModelSet.from_config(config, apart)


def test_a_knowledge_base_that_no_model_fits_says_so(client: OpenAI, libraries: Libraries) -> None:
    client.post("/kb/foreign/documents", body=ZORB, cast_to=httpx.Response)
    httpx.get(f"{client.base_url}kb/foreign", timeout=60)
    root = libraries.config.root
    assert root is not None
    file = root / "foreign" / "kb.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "tokenizer": "0" * 32}))
    kinds = [card.id for card in client.models.list()]
    assert not [name for name in kinds if name.endswith("@foreign")]
