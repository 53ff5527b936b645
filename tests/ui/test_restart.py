"""The server goes in mid-answer and comes back: the page says so, keeps what came and goes on."""

import re

from playwright.sync_api import expect

from worlds.browsing import Visiting
from worlds.page_servers import RealServer


def test_a_restart_in_mid_stream(visit: Visiting, real: RealServer) -> None:
    with visit(real.url) as v:
        page = v.go("chat/new")
        page.get_by_label("Knowledge base").select_option("")
        page.get_by_label("Your question").fill("Tell a long story about a river, in ten parts.")
        page.keyboard.press("Enter")
        streaming = page.locator('.message.answer[data-state="streaming"]')
        # the first piece may be half of a mark-up, of which nothing is seen
        expect(streaming.locator(".md")).to_contain_text(re.compile(r"\w"))
        real.kill()
        failed = page.locator('.message.answer[data-state="failed"]')
        expect(failed).to_contain_text("The connection was lost in mid-answer.")
        assert len(failed.locator(".md").inner_text()) > 0, "what came is kept"
        expect(page.locator(".banner")).to_contain_text("The server does not answer.")
        v.keep("disconnected")
        page.get_by_role("link", name="System").click()  # whatever is asked meanwhile says so too
        expect(page.get_by_role("alert").last).to_contain_text("The server does not answer.")
        page.get_by_role("link", name="Chat", exact=True).click()
        real.start()
        expect(page.locator(".banner")).to_have_count(0, timeout=90_000)
        failed.get_by_role("button", name="Ask again").click()
        expect(streaming).to_be_visible()
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("Stopped.")).to_be_visible()
        v.complaints[:] = [each for each in v.complaints if "ERR_" not in each]
