"""The first minute: nothing is there yet, and the page offers something to try."""

from playwright.sync_api import expect

from worlds.browsing import Visiting
from worlds.serving import KbServer


def test_the_sample_is_offered_and_a_question_about_it_is_answered(
    visit: Visiting, empty: KbServer
) -> None:
    with visit(empty.url) as v:
        page = v.go()
        expect(page.get_by_role("button", name="Load the sample")).to_be_visible()
        questions = page.locator("button.question")
        expect(questions).to_have_count(3)
        v.keep("first-run")
        asked = questions.first.inner_text()
        questions.first.click()
        answer = page.locator('.message.answer[data-state="done"]')
        expect(answer).to_be_visible(timeout=90_000)
        expect(page.locator(".message.user .bubble")).to_have_text(asked)
        expect(answer.locator(".source").first).to_be_visible()
        assert empty.libraries.totals("", "demo").num_documents == 48
        expect(page.get_by_label("Knowledge base")).to_have_value("demo")


def test_the_sample_is_loaded_without_asking(visit: Visiting, empty: KbServer) -> None:
    with visit(empty.url) as v:
        page = v.go()
        page.get_by_role("button", name="Load the sample").click()
        expect(page.get_by_role("heading", name="Ask about demo")).to_be_visible(timeout=90_000)
        expect(page.locator("button.question")).to_have_count(3)
        expect(page.get_by_label("Your question")).to_be_visible()


def test_own_documents_are_the_other_way_in(visit: Visiting, empty: KbServer) -> None:
    with visit(empty.url) as v:
        page = v.go()
        page.get_by_role("link", name="Add documents").click()
        page.get_by_label("Name").fill("not a name")
        expect(page.get_by_text("Letters, digits, - and _ only.")).to_be_visible()
        expect(page.get_by_role("button", name="Go on")).to_be_disabled()
        page.get_by_label("Name").fill("handbook")
        page.get_by_role("button", name="Go on").click()
        expect(page.get_by_text("or drop them here")).to_be_visible()
