"""Compare: one question through two or three ways."""

import json

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
            expect(ways.nth(at)).to_contain_text("loading and computing")
            expect(ways.nth(at).locator("dl.facts")).to_contain_text("Tokens computed")
        for at in (1, 2):
            expect(ways.nth(at).locator("dl.facts")).to_contain_text("nats per token")
            expect(ways.nth(at).locator("dl.facts")).to_contain_text("First token")
        expect(ways.nth(0).locator("dl.facts")).to_contain_text("0")
        v.keep("compare-done")
        ways.nth(1).get_by_role("link", name="Details").click()
        expect(page.locator(".tokens[data-filled]")).to_be_visible()
        page.go_back()
        expect(page.locator(".way")).to_have_count(3)  # it is still there


def test_answers_are_drawn_as_markdown_with_their_differences_marked(
    visit: Visiting, tiny: KbServer, notes: str
) -> None:
    """No model here writes markdown on request, so the reply is made in the browser. The second way
    had to wait for somebody's answer, which is not held against it."""
    said = ["Use `drain` **now**, then wait.", "Use `evict` **now**, then wait."]
    tokens = {"exact": 9, "reused": 0, "recomputed": 0, "computed": 9}
    explain = {"strategy": "full", "ratio": 0, "tokens": tokens}
    events: list[dict[str, object]] = []
    for way, text in enumerate(said):
        waited, computing = 5000 * way, 900 - 600 * way
        timeline = {"queue": 0, "waiting": waited, "searching": 0, "loading": 0, "answering": 100}
        timeline |= {"computing": computing, "first_token": waited + computing, "total": 9000}
        told = {**explain, "timeline_ms": timeline}
        done = {"answer": text, "ttft_ms": waited + computing, "explain": told, "id": None}
        events += [{"way": way, "delta": text}, {"way": way, "done": done}]
    body = ': {"name":"waiting","others":1}\n\n'
    body += "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    with visit(tiny.url) as v:
        page = v.go("compare")
        page.route(
            "**/v1/compare",
            lambda route: route.fulfill(content_type="text/event-stream", body=body),
        )
        page.get_by_label("Knowledge base").select_option(notes)
        page.get_by_label("Question").fill("how do I drain a node?")
        page.get_by_role("button", name="Leave out way 3").click()
        page.get_by_role("button", name="Run 2 ways").click()
        answers = page.locator(".way-answer")
        expect(answers.nth(1).locator("mark")).to_have_text(["evict"])
        expect(answers.nth(1).locator("code mark")).to_have_count(1)
        expect(page.locator(".way").nth(1)).to_contain_text("3.0× sooner")
        expect(answers.nth(0).locator("strong")).to_have_text("now")
        for at in range(2):
            expect(answers.nth(at)).not_to_contain_text("`")


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
