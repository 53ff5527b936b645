"""Compare: one question through two or three ways."""

from playwright.sync_api import expect

from worlds.browsing import Visiting
from worlds.serving import KbServer


def test_three_ways_side_by_side(visit: Visiting, tiny: KbServer, notes: str) -> None:
    with visit(tiny.url) as v:
        page = v.go("compare")
        page.get_by_label("Knowledge base").select_option(notes)
        page.get_by_label("Question").fill("how do I drain a node?")
        page.get_by_role("combobox", name="Way 2").select_option("weave")
        page.get_by_role("button", name="Run 3 ways").click()
        ways = page.locator(".way")
        expect(ways).to_have_count(3)
        for at in range(3):
            expect(ways.nth(at)).to_contain_text("to the first token")
            expect(ways.nth(at).locator("dl.facts")).to_contain_text("Rows computed")
        for at in (1, 2):
            expect(ways.nth(at).locator("dl.facts")).to_contain_text("nats per token")
            expect(ways.nth(at).locator("dl.facts")).to_contain_text("First token")
        expect(ways.nth(0).locator("dl.facts")).to_contain_text("0")
        v.keep("compare-done")
        ways.nth(1).get_by_role("link", name="Details").click()
        expect(page.locator(".tokens[data-filled]")).to_be_visible()
        page.go_back()
        expect(page.locator(".way")).to_have_count(3)  # it is still there


def test_a_way_can_be_left_out_and_another_added(
    visit: Visiting, tiny: KbServer, notes: str
) -> None:
    with visit(tiny.url) as v:
        page = v.go("compare")
        page.get_by_label("Knowledge base").select_option(notes)
        page.get_by_label("Question").fill("what is a taint?")
        page.get_by_role("button", name="Leave out way 3").click()
        expect(page.get_by_role("button", name="Run 2 ways")).to_be_enabled()
        page.get_by_role("button", name="Add a way").click()
        expect(page.get_by_role("button", name="Run 3 ways")).to_be_enabled()
