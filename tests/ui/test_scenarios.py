"""The two scenarios of the QCFuse demonstration, as walks over the sample with a real model.

1. Chat: look at the chunks that are stored, bring a document of one's own, choose how, ask, choose
   another way, compare.
2. Details: passages with their relevance, the tokens that were chosen turn orange and then green
   layer by layer, figures beside a full prefill, the timeline, memory.
"""

import re
from pathlib import Path

from playwright.sync_api import expect

from worlds.browsing import Visiting
from worlds.page_servers import SHOWN, RealServer

DONE = '.message.answer[data-state="done"]'


def test_scenario_1_chat(visit: Visiting, sampled: RealServer, tmp_path: Path) -> None:
    own = tmp_path / "zorbs.txt"
    own.write_text("Zorbs\n\nA zorb is a small round tool of the valley. It is 14 cm wide.\n")
    with visit(sampled.url) as v:
        page = v.go("chat/new")
        page.get_by_label("Knowledge base").select_option("valley")
        # 1. every chunk can be looked at before anything is asked
        page.get_by_role("button", name="Library").click()
        page.locator(".library-row").filter(has_text="Vale Railway").click()
        expect(page.locator(".chunks-of code")).to_have_text(re.compile("^[0-9a-f]{8}$"))
        v.keep("scenario-1-library")
        # 2. a document of one's own, asked about at once
        page.locator(".panel input[type=file]").set_input_files(own)
        expect(page.locator(".upload")).to_contain_text("1 document added", timeout=60_000)
        page.get_by_role("button", name="Close the panel").click()
        # 3. exact first, then the fast way
        page.get_by_role("radio", name="exact").check()
        page.get_by_label("Your question").fill(SHOWN[0])
        page.keyboard.press("Enter")
        expect(page.locator(DONE)).to_have_count(1, timeout=90_000)
        expect(page.locator(f"{DONE} .source").first).to_contain_text("Jorun Pask")
        page.get_by_role("radio", name="fast", exact=True).check()
        page.get_by_label("Your question").fill(SHOWN[1])
        page.keyboard.press("Enter")
        expect(page.locator(DONE)).to_have_count(2, timeout=90_000)
        expect(page.locator(DONE).last.locator(".timing")).to_contain_text("weave 15 %")
        v.keep("scenario-1-chat")
        # 4. the same question through three ways
        page.get_by_role("link", name="Compare").click()
        page.get_by_label("Question").fill(SHOWN[0])
        page.get_by_role("combobox", name="Way 2").select_option("weave")
        page.get_by_role("button", name="Run 3 ways").click()
        for at in range(3):
            facts = page.locator(".way").nth(at).locator("dl.facts")
            expect(facts).to_contain_text("Measured over", timeout=120_000)
        v.keep("scenario-1-compare")


def test_scenario_2_details(visit: Visiting, sampled: RealServer) -> None:
    with visit(sampled.url) as v:
        page = v.go("chat/new")
        page.get_by_label("Knowledge base").select_option("valley")
        page.get_by_role("radio", name="fast", exact=True).check()
        page.get_by_label("Your question").fill(SHOWN[1])
        page.keyboard.press("Enter")
        expect(page.locator(DONE)).to_be_visible(timeout=90_000)
        page.locator(DONE).get_by_role("link", name="Details").click()
        # left: passages with their relevance
        expect(page.locator(".passage").first).to_contain_text("score")
        v.keep("scenario-2-outcome")
        step = page.get_by_label("Step of the replay")
        step.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        expect(page.locator(".tokens")).to_have_attribute("data-replay", "select")
        v.keep("scenario-2-chosen")
        for _ in range(12):
            page.keyboard.press("ArrowRight")
        expect(page.locator(".replay-words")).to_contain_text("Layer 11")
        v.keep("scenario-2-layers")
        page.keyboard.press("End")
        expect(page.locator(".replay-words")).to_contain_text("Layer 29")
        v.keep("scenario-2-recomputed")
        # right: figures beside full computation, the timeline, the answer, more metrics
        expect(page.get_by_text("This answer beside a full prefill")).to_be_visible()
        expect(page.locator(".gantt-row").first).to_be_visible()
        page.get_by_role("link", name="Cache and memory in detail").click()
        expect(page.get_by_role("heading", name="Tiers")).to_be_visible()
        v.keep("scenario-2-metrics")
