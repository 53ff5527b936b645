"""axe-core over every page, and a walk without a mouse."""

from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from worlds.browsing import NARROW, WIDE, Visiting
from worlds.serving import KbServer

GRAVE = {"serious", "critical"}


def violations(page: Page) -> list[str]:
    """What axe finds grave, one line each."""
    found: dict[str, Any] = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{each['id']}: {node['html'][:120]} {node.get('failureSummary', '')[:300]}"
        for each in found["violations"]
        if each["impact"] in GRAVE
        for node in each["nodes"][:3]
    ]


@pytest.fixture(scope="session")
def axe() -> str:
    return (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("theme", "size"), [("light", WIDE), ("dark", WIDE), ("light", NARROW)], ids=str
)
def test_axe_finds_nothing_serious(
    visit: Visiting,
    tiny: KbServer,
    notes: str,
    fused: str,
    axe: str,
    theme: str,
    size: dict[str, int],
) -> None:
    signs = {
        "chat/new": ".composer",
        "compare": "form.card",
        f"answer/{fused}": ".tokens[data-filled]",
        "answer": "table",
        f"documents/{notes}": ".documents-table",
        "cache": ".grid.two",
        "quality": ".card, .empty",
        "system": ".tiles",
    }
    with visit(tiny.url, color_scheme=theme, viewport=size) as v:
        page = v.go("chat/new")
        page.evaluate(axe)
        page.get_by_label("Knowledge base").select_option(notes)
        page.get_by_label("Your question").fill("what is a quota?")
        page.keyboard.press("Enter")
        expect(page.locator('.message.answer[data-state="done"]')).to_be_visible()
        assert violations(page) == [], "a conversation"
        page.get_by_role("button", name="Library").click()
        page.locator(".library-row").first.click()
        expect(page.locator(".chunks-of")).to_be_visible()
        assert violations(page) == [], "the library beside it"
        for place, sign in signs.items():
            page.evaluate(f"location.hash = '#/{place}'")
            expect(page.locator(sign).first).to_be_visible()
            assert violations(page) == [], place


def focused(page: Page) -> str:
    """What has the focus, in words; and that it can be seen."""
    told = page.evaluate(
        """() => {
          const e = document.activeElement;
          if (e === document.body) return ["the browser's own", true];
          const style = getComputedStyle(e);
          const near = e.nextElementSibling && getComputedStyle(e.nextElementSibling);
          const ring = (s) => s && s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0;
          const seen = ring(style) || style.boxShadow !== "none"
            || (e.type === "radio" && ring(near)) || e.id === "question";
          const name = e.getAttribute("aria-label") || e.labels?.[0]?.innerText || e.innerText;
          return [name || e.id, seen];
        }"""
    )
    assert told[1], f"the focus on {told[0]!r} cannot be seen"
    return str(told[0]).strip()


def tab_to(page: Page, name: str, key: str = "Tab") -> None:
    for _ in range(80):
        page.keyboard.press(key)
        if focused(page).startswith(name):
            return
    raise AssertionError(f"80 times {key} do not reach {name!r}")


def test_from_question_to_details_without_a_mouse(
    visit: Visiting, tiny: KbServer, notes: str
) -> None:
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        expect(page.get_by_label("Your question")).to_be_visible()
        page.keyboard.press("Tab")
        assert focused(page) == "To the content", "past the navigation in one step"
        page.keyboard.press("Enter")
        tab_to(page, "Your question")
        tab_to(page, "Knowledge base")
        page.keyboard.type(notes)
        expect(page.get_by_label("Knowledge base")).to_have_value(notes)
        tab_to(page, "auto")
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("radio", name="fast", exact=True)).to_be_checked()
        tab_to(page, "Your question", "Shift+Tab")
        page.keyboard.type("what is a quota?")
        page.keyboard.press("Enter")
        expect(page.locator('.message.answer[data-state="done"]')).to_be_visible()
        tab_to(page, "Details", "Shift+Tab")
        page.keyboard.press("Enter")
        expect(page.locator(".tokens[data-filled]")).to_be_visible()
        tab_to(page, "Replay")
        tab_to(page, "Tokens of the prompt")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(page.locator(".inspector")).to_contain_text("#1")
        tab_to(page, "Documents", "Shift+Tab")
        page.keyboard.press("Enter")
        tab_to(page, "Delete")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_be_visible()
        assert focused(page) == "Keep"
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert focused(page).startswith("Delete"), "the focus is back where it was"


def test_the_tree_and_headings_are_said_in_order(
    visit: Visiting, tiny: KbServer, fused: str
) -> None:
    with visit(tiny.url) as v:
        page = v.go("cache")
        tree = page.get_by_role("tree", name="Knowledge tree")
        expect(tree.get_by_role("treeitem").first).to_be_visible()
        first = tree.get_by_role("treeitem").first
        first.focus()
        if first.get_attribute("aria-expanded") is not None:
            page.keyboard.press("ArrowRight")
            expect(first).to_have_attribute("aria-expanded", "true")
            expect(tree.get_by_role("treeitem")).not_to_have_count(1)
        assert page.locator("main h1").count() == 1
