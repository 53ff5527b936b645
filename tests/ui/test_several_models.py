"""A server with several models: one is chosen, and chat, comparison and figures are of that one."""

import json
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from kvweave.app.model_set import ModelSet
from worlds.browsing import NARROW, WIDE, Visiting
from worlds.page_servers import NOTES, answered, bring
from worlds.serving import KbServer, make_libraries, make_weave, serving
from worlds.tiny_models import make_chat_model_folder, make_model_folder, make_tokenizer_files

DONE = '.message.answer[data-state="done"]'
KB = "notes"
ROOM = {"max_position_embeddings": 8192}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KbServer]:
    """`tiny` and `twin` have one tokenizer, `apart` another; `notes` is of the first two."""
    folder, root = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("kbs")
    size = make_tokenizer_files(folder / "apart/llama", "Other words. " * 9).get_vocab_size()
    ids = {"bos_token_id": 0, "eos_token_id": 2}
    weaves = [
        make_weave(make_chat_model_folder(folder / "tiny", **ROOM), name="tiny"),
        make_weave(make_chat_model_folder(folder / "twin", seed=1, **ROOM), name="twin"),
        make_weave(
            make_model_folder(folder / "apart", "llama", seed=2, vocab_size=size, **ids, **ROOM),
            name="apart",
        ),
    ]
    models = ModelSet(weaves)
    libraries = make_libraries(models, root)
    with serving(models, libraries=libraries) as address:
        for title, text in NOTES.items():
            bring(address, KB, title, text)
        yield KbServer(address, weaves[0], libraries, root)
    libraries.close()
    models.close()


def model(page: Page) -> Locator:
    return page.get_by_role("combobox", name="Model", exact=True)


def ask(page: Page, question: str) -> None:
    page.get_by_label("Your question").fill(question)
    page.get_by_role("button", name="Ask", exact=True).click()


def test_the_chosen_model_answers_and_the_choice_is_remembered(
    visit: Visiting, several: KbServer
) -> None:
    with visit(several.url) as v:
        page = v.go("chat/new")
        expect(model(page)).to_have_value("tiny")
        model(page).select_option("twin")
        expect(page.get_by_label("Knowledge base")).to_have_value(KB)
        ask(page, "what is a taint?")
        answer = page.locator(DONE)
        expect(answer).to_be_visible()
        expect(answer.locator(".chip", has_text="twin")).to_be_visible()
        v.keep("models-chat")
        answer.get_by_role("link", name="Details").click()
        expect(page.locator(".details-head")).to_contain_text("twin")
        page = v.go("chat/new")
        page.reload()
        expect(model(page)).to_have_value("twin")


def test_a_knowledge_base_of_another_tokenizer_is_not_offered(
    visit: Visiting, several: KbServer
) -> None:
    with visit(several.url) as v:
        page = v.go("chat/new")
        kb = page.get_by_label("Knowledge base")
        expect(kb).to_have_value(KB)
        model(page).select_option("apart")
        expect(kb).to_have_value("")
        expect(kb.locator("option", has_text="for other models")).to_be_disabled()
        ask(page, "hello?")
        expect(page.locator(DONE).locator(".chip", has_text="apart")).to_be_visible()
        model(page).select_option("tiny")
        expect(kb).to_have_value(KB)


def test_ways_are_compared_with_the_chosen_model(visit: Visiting, several: KbServer) -> None:
    with visit(several.url) as v:
        page = v.go("compare")
        model(page).select_option("twin")
        page.get_by_label("Question").fill("how do I drain a node?")
        with page.expect_request("**/v1/compare") as sent:
            page.get_by_role("button", name="Run 3 ways").click()
        assert json.loads(sent.value.post_data or "")["model"] == "twin"
        ways = page.locator(".way")
        for at in range(3):
            expect(ways.nth(at).locator("dl.facts")).to_contain_text("Tokens computed")
        expect(page.get_by_text("Answered by twin.")).to_be_visible()
        v.keep("models-compare")
        ways.nth(0).get_by_role("link", name="Details").click()
        expect(page.locator(".details-head")).to_contain_text("twin")


def test_figures_are_those_of_the_chosen_model(visit: Visiting, several: KbServer) -> None:
    words = "tell me all of taints and tolerations, of nodes and of pods, and of what they do " * 3
    answered(several.url, model="apart", messages=[{"role": "user", "content": words}])
    tree = f"{several.url}/v1/tree"
    nodes = {
        name: len(httpx.get(tree, params={"model": name}, timeout=60).json()["nodes"])
        for name in ("tiny", "apart")
    }
    with visit(several.url) as v:
        page = v.go("cache")
        model(page).select_option("apart")
        expect(page.get_by_role("treeitem")).to_have_count(nodes["apart"])
        expect(page.get_by_text("last 30 minutes, all models")).to_be_visible()
        v.keep("models-cache")
        model(page).select_option("tiny")
        expect(page.get_by_text(f"{KB} · host")).to_be_visible()
        page = v.go("quality")
        with page.expect_response("**/v1/quality*model=twin*") as told:
            model(page).select_option("twin")
        assert told.value.json()["model"] == "twin"
        expect(page.get_by_text("No curve is known for twin")).to_be_visible()
        v.keep("models-quality")
        page = v.go("system")
        expect(page.get_by_text("twin · context 8,192 tokens")).to_be_visible()
        expect(page.get_by_text("exact KV and pages are those of twin")).to_be_visible()
        v.keep("models-system")


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_the_choice_fits(visit: Visiting, several: KbServer, size: dict[str, int]) -> None:
    width = (
        "Math.max(document.documentElement.scrollWidth, document.querySelector('main').scrollWidth)"
    )
    with visit(several.url, viewport=size) as v:
        for place in ("chat/new", "compare", "cache", "quality", "system"):
            page = v.go(place)
            expect(model(page)).to_be_visible()
            page.wait_for_timeout(150)  # charts measure their width first
            v.keep(f"models-{place.partition('/')[0]}-{size['width']}")
            assert page.evaluate(width) <= size["width"], place


def test_one_model_leaves_nothing_to_choose(visit: Visiting, tiny: KbServer, notes: str) -> None:
    with visit(tiny.url) as v:
        for place in ("chat/new", "compare", "cache", "quality", "system"):
            page = v.go(place)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            expect(model(page)).to_have_count(0)
