"""Open WebUI, as it is installed, before real servers: by its own API, and its page in a browser.

`make test-webui`. What runs here is the row of docs/clients.md.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.browsing import Visit, running_browser, visiting
from worlds.page_servers import NOTES, bring
from worlds.serving import (
    GatedDecoder,
    make_libraries,
    make_weave,
    serving,
    user,
    wait_for_health,
)
from worlds.tiny_models import make_chat_model_folder
from worlds.tool_models import TellingDecoder, make_tool_model_folder
from worlds.weaves import plain_weave
from worlds.webui_server import WebUI, running_webui

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.webui, pytest.mark.timeout(1800)]

MODEL, KB_MODEL, HELD, CALLER = "tiny", "tiny@notes", "held", "caller"
ASKED = "how do I drain a node?"
ZORB = "# Zorbs\n\nA zorb is a small round tool. It is 14 cm wide.\n"
TOOLS_CONTEXT = 32768  # its built-in tools are 25 kB of JSON
CALL = '<tool_call>\n{"name": "get_current_timestamp", "arguments": {}}\n</tool_call>'


class World(NamedTuple):
    webui: WebUI
    held_url: str
    held: GatedDecoder
    caller: TellingDecoder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Three servers behind one Open WebUI: a model with a knowledge base, one that a test holds
    still, and one that says what it is told and whose template knows tools."""

    def folder(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    gates: list[GatedDecoder] = []

    def gated(decoder: Any) -> GatedDecoder:
        gates.append(GatedDecoder(decoder))
        return gates[0]

    with ExitStack() as stack:
        model = make_chat_model_folder(folder("tiny"), max_position_embeddings=8192)
        weave = stack.enter_context(make_weave(model, name=MODEL))
        libraries = make_libraries(weave, folder("kbs"))
        stack.callback(libraries.close)
        url = stack.enter_context(serving(weave, libraries=libraries))
        for title, text in NOTES.items():
            bring(url, "notes", title, text)
        held = stack.enter_context(make_weave(model, gated, name=HELD))
        held_url = stack.enter_context(serving(held))
        tools = make_tool_model_folder(folder("tools"), TOOLS_CONTEXT)
        caller = TellingDecoder(load_decoder(tools, device="cpu"), Tokenizer(tools))
        calling = stack.enter_context(plain_weave(caller, caller.tokenizer, name=CALLER))
        caller_url = stack.enter_context(serving(calling))
        urls = [url, held_url, caller_url]
        webui = stack.enter_context(
            running_webui(folder("webui"), urls, embedder="words", task_model=MODEL)
        )
        yield World(webui, held_url, gates[0], caller)


@pytest.fixture(scope="module")
def webui(world: World) -> WebUI:
    return world.webui


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)
    with running_browser() as opened:
        yield opened


def asked(webui: WebUI, model: str, **fields: Any) -> Any:
    body = {"model": model, "messages": user(ASKED), "stream": False, "max_tokens": 8, **fields}
    return webui.call("POST", "/api/chat/completions", body)


# ── by its API ────────────────────────────────────────────────────────────────


def test_it_lists_models_and_knowledge_bases(webui: WebUI) -> None:
    listed = [each["id"] for each in webui.call("GET", "/api/models")["data"]]
    assert {MODEL, KB_MODEL, HELD, CALLER} <= set(listed)


@pytest.mark.parametrize("model", [MODEL, KB_MODEL])
def test_it_gets_an_answer_whole_and_in_a_stream(webui: WebUI, model: str) -> None:
    drawn = {"temperature": 0, "seed": 5}
    whole = asked(webui, model, **drawn)["choices"][0]["message"]["content"]
    body = {"model": model, "messages": user(ASKED), "stream": True, "max_tokens": 8, **drawn}
    text = ""
    with webui.http.stream("POST", "/api/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                text += choices[0]["delta"].get("content") or "" if choices else ""
    assert text == whole != ""


def test_settings_of_a_chat_arrive(webui: WebUI) -> None:
    """As its page sends them: under `params`."""
    params: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "seed": 3,
    }
    params |= {"frequency_penalty": 0.1, "presence_penalty": 0.1, "stop": ["zz"], "max_tokens": 3}
    body = {"model": MODEL, "messages": user(ASKED), "stream": False, "params": params}
    assert webui.call("POST", "/api/chat/completions", body)["usage"]["completion_tokens"] == 3
    refused = webui.http.post(
        "/api/chat/completions", json={**body, "params": {"reasoning_effort": "high"}}, timeout=60
    )
    assert refused.status_code == 400
    assert "'reasoning_effort' is not supported" in refused.text, (
        "what is wrong is told to who set it"
    )


@pytest.mark.parametrize("task", ["title", "tags", "follow_up", "queries", "emoji"])
def test_its_tasks_are_answered(webui: WebUI, task: str) -> None:
    messages = [*user(ASKED), {"role": "assistant", "content": "Cordon it first."}]
    body = {"model": KB_MODEL, "messages": messages, "prompt": ASKED, "type": "web_search"}
    reply = webui.call("POST", f"/api/v1/tasks/{task}/completions", body)
    assert reply["model"] == MODEL, "the task model: no knowledge base is searched for it"


def test_its_own_documents_are_embedded_and_found(webui: WebUI) -> None:
    file = webui.take_in("zorb.md", ZORB)
    made = webui.call("POST", "/api/v1/knowledge/create", {"name": "tools", "description": "x"})
    webui.call("POST", f"/api/v1/knowledge/{made['id']}/file/add", {"file_id": file})
    query = {"collection_names": [made["id"]], "query": "How wide is a zorb?", "k": 1}
    found = webui.call("POST", "/api/v1/retrieval/query/collection", query)
    assert "14 cm wide" in found["documents"][0][0]
    reply = asked(webui, MODEL, files=[{"type": "collection", "id": made["id"]}])
    assert reply["usage"]["prompt_tokens"] > 100, "its own prompt with what it found"


def test_embeddings_pass_through(webui: WebUI) -> None:
    body = {"model": "words", "input": ["zorb", "quota"]}
    assert len(webui.call("POST", "/api/embeddings", body)["data"]) == 2


# ── in a browser ──────────────────────────────────────────────────────────────


def opened(visit: Visit, model: str) -> "Page":
    """A new chat with a model."""
    page = visit.go()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Selected model").click()
    page.get_by_role("option", name=model, exact=True).click()
    return page


def say(page: "Page", text: str) -> None:
    page.locator("#chat-input").click()
    page.locator("#chat-input").press_sequentially(text)
    page.keyboard.press("Enter")


def test_its_page_shows_answers_of_a_knowledge_base(webui: WebUI, browser: "Browser") -> None:
    from playwright.sync_api import expect

    with visiting(browser, webui.url) as visit:
        page = opened(visit, KB_MODEL)
        for number in (1, 2):
            say(page, ASKED)
            # what can be done with an answer is offered when it is complete, and the page is whole
            expect(page.get_by_role("button", name="Regenerate")).to_have_count(number)
        visit.keep("openwebui-kb")


def test_stop_on_its_page_ends_the_answer(world: World, browser: "Browser") -> None:
    from playwright.sync_api import expect

    with visiting(browser, world.webui.url) as visit:
        page = opened(visit, HELD)
        say(page, ASKED)
        world.held.permits.release(12)  # some words come, no more
        wait_for_health(world.held_url, lambda told: world.held.steps >= 12)
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Stop")).to_have_count(0)
        release = world.held.permits.release
        wait_for_health(world.held_url, lambda told: told["running"] == 0, nudge=release)
        assert world.held.steps < 500, "it went on to its end"
        visit.keep("openwebui-stopped")


def test_its_built_in_tools_are_called(world: World, browser: "Browser") -> None:
    from playwright.sync_api import expect

    card = {"id": CALLER, "name": CALLER, "base_model_id": None, "params": {}}
    card |= {"meta": {"capabilities": {"builtin_tools": True}}}
    world.webui.call("POST", "/api/v1/models/create", card)
    with visiting(browser, world.webui.url) as visit:
        page = opened(visit, CALLER)
        world.caller.tell(CALL)
        say(page, "what time is it?")
        expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
        visit.keep("openwebui-tools")
        expect(page.get_by_text("get_current_timestamp")).to_be_visible()
