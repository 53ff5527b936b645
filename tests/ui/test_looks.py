"""Every page in light and dark, wide and 360 pixels narrow: nothing sticks out."""

import pytest
from playwright.sync_api import Page, expect

from worlds.browsing import NARROW, WIDE, Visiting
from worlds.serving import KbServer

SIZES = {"wide": WIDE, "narrow": NARROW}


def places(notes: str, fused: str) -> dict[str, tuple[str, str]]:
    """Name of a page → its address and what says that it is drawn."""
    return {
        "chat": ("chat/new", ".composer"),
        "compare": ("compare", "form.card"),
        "details": (f"answer/{fused}", ".tokens[data-filled]"),
        "answers": ("answer", "table, .empty"),
        "documents": (f"documents/{notes}", ".documents-table"),
        "cache": ("cache", ".grid.two"),
        "quality": ("quality", ".card, .empty"),
        "system": ("system", ".tiles"),
    }


def sticks_out(page: Page) -> list[str]:
    """Elements that make the page wider than the window, unless they scroll by themselves."""
    return list(
        page.evaluate(
            """() => {
              const wide = document.documentElement.clientWidth;
              const boxes = [document.documentElement, document.querySelector("main")];
              if (boxes.every((box) => box.scrollWidth <= wide)) return [];
              const overflow = (e) => getComputedStyle(e).overflowX;
              const scrolls = (e) => e && e !== document.body
                && (/auto|scroll|hidden/.test(overflow(e)) || scrolls(e.parentElement));
              const out = (e) => e.getBoundingClientRect().right > wide + 1;
              const found = [...document.querySelectorAll("main *")].filter(
                (e) => out(e) && !scrolls(e.parentElement));
              return [...found.map((e) => `${e.tagName}.${e.className}`).slice(0, 5), "it scrolls"];
            }"""
        )
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_fits(
    visit: Visiting, tiny: KbServer, notes: str, fused: str, theme: str, size: str
) -> None:
    with visit(tiny.url, color_scheme=theme, viewport=SIZES[size]) as v:
        v.go("chat/new").get_by_label("Knowledge base").select_option(notes)
        for name, (place, sign) in places(notes, fused).items():
            page = v.go(place)
            expect(page.locator(sign).first).to_be_visible()
            page.wait_for_timeout(150)  # charts measure their width first
            v.keep(f"{name}-{theme}-{size}")
            assert sticks_out(page) == [], name
            dark = page.evaluate(
                "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
            )
            assert (sum(dark) < 200) is (theme == "dark"), name


def test_the_switch_overrides_the_system_and_is_remembered(
    visit: Visiting, tiny: KbServer, notes: str
) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with visit(tiny.url, color_scheme="light") as v:
        page = v.go("chat/new")
        light = page.evaluate(paper)
        page.get_by_role("button", name="Dark").click()
        expect(page.get_by_role("button", name="Dark")).to_have_attribute("aria-pressed", "true")
        dark = page.evaluate(paper)
        assert dark != light
        page.reload()
        assert page.evaluate(paper) == dark
        page.get_by_role("button", name="As the system").click()
        assert page.evaluate(paper) == light


def test_the_menu_of_a_narrow_screen_opens_and_closes(visit: Visiting, tiny: KbServer) -> None:
    with visit(tiny.url, viewport=NARROW) as v:
        page = v.go("chat/new")
        documents = page.get_by_role("navigation", name="Pages").get_by_role("link", name="System")
        expect(documents).to_be_hidden()
        page.get_by_role("button", name="Menu", exact=True).click()
        expect(documents).to_be_visible()
        v.keep("menu-narrow")
        page.keyboard.press("Escape")
        expect(documents).to_be_hidden()
        page.get_by_role("button", name="Menu", exact=True).click()
        documents.click()
        expect(page.get_by_role("heading", name="System")).to_be_visible()
        expect(documents).to_be_hidden()
