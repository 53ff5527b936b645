"""The documentation as `make site` built it: sent by a server, and opened from a disk."""

import pytest
from playwright.sync_api import Page, expect

from kvweave.serve.ui.page import SITE
from worlds.browsing import Visiting
from worlds.serving import KbServer

pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="NOT CHECKED: run `make site` first")


def search_for_a_close_call(page: Page) -> None:
    words = page.locator("input.md-search__input")
    words.click()
    words.press_sequentially("close call")  # it listens to keys
    found = page.locator(".md-search-result__item").filter(has_text="Calibration")
    expect(found.first).to_be_visible()


def test_a_server_sends_pages_that_find_words_and_lead_on(visit: Visiting, tiny: KbServer) -> None:
    with visit(tiny.url) as visited:
        visited.page.goto(f"{tiny.url}/docs/")
        search_for_a_close_call(visited.page)
        visited.page.goto(f"{tiny.url}/docs/tutorial.html")
        expect(visited.page.locator("h1")).to_contain_text("Tutorial")
        visited.page.goto(f"{tiny.url}/docs/results.html")
        drawn = visited.page.locator("img[src$='ttft-h200.svg']")
        assert drawn.evaluate("picture => picture.decode().then(() => picture.naturalWidth)") > 100


def test_pages_on_a_disk_find_words_too(visit: Visiting) -> None:
    with visit(SITE.as_uri()) as visited:
        visited.page.goto((SITE / "index.html").as_uri())
        search_for_a_close_call(visited.page)
