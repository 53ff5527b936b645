"""Chat: ask, stop, retry, edit, look at sources, come back later."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from kvweave.app.dial import REUSES
from worlds.browsing import Visiting
from worlds.page_servers import bring
from worlds.serving import KbServer

SUMMARY = "To drain a node, cordon it first. Then evict its pods."
DONE = '.message.answer[data-state="done"]'


def ask(page: Page, question: str) -> None:
    page.get_by_label("Your question").fill(question)
    page.get_by_role("button", name="Ask", exact=True).click()


def test_upload_ask_and_open_details(visit: Visiting, empty: KbServer, tmp_path: Path) -> None:
    file = tmp_path / "draining.md"
    file.write_text("# Draining\n\nTo drain a node, cordon it first. Then evict its pods.\n")
    with visit(empty.url) as v:
        page = v.go("documents/handbook")
        page.locator("input[type=file]").set_input_files(file)
        expect(page.locator(".upload")).to_contain_text("1 document added")
        page.get_by_role("link", name="Chat", exact=True).click()
        expect(page.get_by_label("Knowledge base")).to_have_value("handbook")
        ask(page, "how do I drain a node?")
        answer = page.locator(DONE)
        expect(answer).to_be_visible()
        expect(answer.locator(".timing")).to_contain_text("to the first token")
        expect(answer.locator(".source")).to_have_count(1)
        answer.get_by_role("link", name="Details").click()
        expect(page.get_by_role("heading", name="how do I drain a node?")).to_be_visible()
        expect(page.locator(".tokens")).to_contain_text("cordon")
        expect(page.locator(".passage")).to_have_count(1)
        expect(page.locator(".passage .summary")).to_have_text(SUMMARY)
        page.go_back()
        page.get_by_role("button", name="Library").click()
        page.locator(".library-row").click()
        expect(page.locator(".chunks-of .summary")).to_have_text(SUMMARY)


def test_a_source_opens_its_passage(visit: Visiting, tiny: KbServer, notes: str) -> None:
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        page.get_by_label("Knowledge base").select_option(notes)
        ask(page, "what does a quota limit?")
        source = page.locator(".source").first
        expect(source).to_be_visible()
        source.click()
        panel = page.get_by_role("complementary", name="Passage")
        expect(panel.locator(".chunk-text")).to_contain_text(re.compile("node|namespace"))
        page.keyboard.press("Escape")
        expect(panel).to_be_hidden()
        expect(source).to_be_focused()


def test_edit_and_retry_ask_again_in_place(visit: Visiting, tiny: KbServer, notes: str) -> None:
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        page.get_by_label("Knowledge base").select_option(notes)
        ask(page, "what is a taint?")
        expect(page.locator(DONE)).to_have_count(1)
        page.get_by_role("button", name="Retry").click()
        expect(page.locator(DONE)).to_have_count(1)
        page.locator(".message.user").hover()
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit your question").fill("what is a quota?")
        page.get_by_role("button", name="Ask again").click()
        expect(page.locator(".message.user .bubble")).to_have_text("what is a quota?")
        expect(page.locator(DONE)).to_have_count(1)
        ask(page, "and a taint?")
        expect(page.locator(DONE)).to_have_count(2)


def test_an_answer_stops_when_it_is_told_to(visit: Visiting, tiny: KbServer) -> None:
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        page.get_by_label("Knowledge base").select_option("")
        # a stream that never ends by itself: the tiny model may be done before a click arrives
        page.evaluate(
            """() => {
              const real = fetch;
              const word = { id: "x", choices: [{ delta: { content: "word " } }] };
              const event = new TextEncoder().encode(`data: ${JSON.stringify(word)}\\n\\n`);
              const endless = (signal) => new ReadableStream({ start(pen) {
                const timer = setInterval(() => pen.enqueue(event), 50);
                signal.addEventListener("abort", () => {
                  clearInterval(timer);
                  pen.error(new DOMException("stopped", "AbortError"));
                });
              } });
              window.fetch = (path, options) => (String(path).includes("chat/completions")
                ? Promise.resolve(new Response(endless(options.signal)))
                : real(path, options));
            }"""
        )
        ask(page, "go on and on")
        expect(page.locator(".message.answer")).to_contain_text("word word")
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("Stopped.")).to_be_visible()
        expect(page.get_by_role("button", name="Ask", exact=True)).to_be_visible()


def test_a_conversation_is_there_after_a_reload_and_goes_when_deleted(
    visit: Visiting, tiny: KbServer, notes: str
) -> None:
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        page.get_by_label("Knowledge base").select_option(notes)
        ask(page, "what keeps pods from a node?")
        expect(page.locator(DONE)).to_be_visible()
        said = page.locator(f"{DONE} .md").inner_text()
        page.reload()
        expect(page.locator(f"{DONE} .md")).to_have_text(said)
        page.get_by_role("link", name="New", exact=True).click()
        expect(page.locator(".message")).to_have_count(0)
        page.get_by_role("link", name="what keeps pods from a node?").click()
        expect(page.locator(DONE)).to_have_count(1)
        page.get_by_role("button", name="Delete the conversation").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.get_by_text("What you ask is listed here.")).to_be_visible()
        page.reload()
        expect(page.locator(".message")).to_have_count(0)


def test_the_dial_says_what_it_trades_and_is_sent(
    visit: Visiting, tiny: KbServer, notes: str
) -> None:
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        page.get_by_label("Knowledge base").select_option(notes)
        expect(page.get_by_role("radio", name="auto")).to_be_checked()
        words = page.locator(".dial-words").inner_text()
        page.get_by_role("radio", name="auto").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("radio", name="fastest")).to_be_checked()
        expect(page.locator(".dial-words")).not_to_have_text(words)
        with page.expect_request("**/chat/completions") as sent:
            ask(page, "what is a quota?")
        body = sent.value.post_data_json
        assert body["reuse"] not in (None, "auto")
        assert (body["kb"], body["explain"]) == (notes, True)
        expect(page.locator(DONE)).to_be_visible()


def test_passages_of_one_name_are_told_apart(visit: Visiting, empty: KbServer) -> None:
    plain = " ".join(f"Pod {n} runs on a node of the cluster." for n in range(120))
    bring(empty.url, "parts", "Report", plain)
    ruled = "\n\n".join(f"## Rule {n} {{#r{n}}}\n\n{plain[:900]}" for n in range(3))
    bring(empty.url, "sections", "Rules", ruled)
    for kb, sign in (("parts", re.compile(r"Report\s*part \d")), ("sections", "Rules › Rule")):
        with visit(empty.url) as v:
            page = v.go("chat/new")
            page.get_by_label("Knowledge base").select_option(kb)
            ask(page, "where does a pod run?")
            sources = page.locator(f"{DONE} .source")
            expect(sources.filter(has_text=sign).nth(1)).to_be_visible()
            shown = sources.all_inner_texts()
            assert len({text.split("\n", 1)[-1] for text in shown}) == len(shown), shown
            assert not any("{#" in text for text in shown)


def reply_with(timeline: dict[str, int], full_ms: int, tokens: dict[str, int]) -> str:
    """A streamed reply whose times are in the test's hands."""
    explain = {"timeline_ms": timeline, "full_ms": full_ms, "tokens": tokens, "ratio": 0}
    events = [
        {"id": "x", "choices": [{"delta": {"content": "Hello"}}]},
        {"id": "x", "choices": [], "explain": {**explain, "strategy": "prefix"}},
    ]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


@pytest.mark.parametrize(("computing", "sooner"), [(1100, "6.5× sooner"), (8900, None)])
def test_waiting_counts_on_neither_side_of_the_comparison_with_full_prefill(
    visit: Visiting, tiny: KbServer, computing: int, sooner: str | None
) -> None:
    """20 s to the first token, nearly all of it in a queue, beside a full prefill of 7.8 s; and a
    prompt that took longer than that, after no waiting."""
    waiting = 20_200 - computing - 200
    timeline = {"queue": 200, "first_token": 20_000, "waiting": waiting, "searching": 100}
    timeline |= {"loading": 100, "computing": computing, "answering": 3000, "total": 23_000}
    tokens = {"exact": 0, "reused": 700, "recomputed": 100, "computed": 200}
    body = reply_with(timeline, 7800, tokens)
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(content_type="text/event-stream", body=body),
        )
        ask(page, "hello?")
        timing = page.locator(".timing")
        expect(timing).to_contain_text("20.2 s to the first token")
        shown = timing.locator(".times li").all_inner_texts()
        assert [each.split()[0] for each in shown] == [
            *("waiting", "searching", "loading", "computing", "answering")
        ]
        expect(timing).to_contain_text(f"this prompt {(computing + 100) / 1000:.2f} s")
        expect(timing).to_contain_text("full prefill: about 7.80 s")
        if sooner is None:
            expect(timing).not_to_contain_text("sooner")
        else:
            expect(timing).to_contain_text(sooner)
        v.keep(f"waited-{computing}")


def test_a_long_wait_says_its_stage_and_seconds(visit: Visiting, tiny: KbServer) -> None:
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        page.get_by_label("Knowledge base").select_option("")
        page.evaluate(
            """() => {
              const real = fetch;
              const pieces = [': {"name":"waiting","others":2}\\n\\n',
                ': {"name":"reading","others":0}\\n\\n',
                'data: {"id":"x","choices":[{"delta":{"content":"word"}}]}\\n\\n'
                  + 'data: [DONE]\\n\\n'];
              const slow = () => new ReadableStream({ start(pen) {
                window.next = () => pen.enqueue(new TextEncoder().encode(pieces.shift()));
              } });
              window.fetch = (path, options) => (String(path).includes("chat/completions")
                ? Promise.resolve(new Response(slow())) : real(path, options));
            }"""
        )
        ask(page, "hello?")
        waiting = page.locator(".waiting")
        expect(waiting).to_contain_text(re.compile(r"sending\s*· 1 s"))
        page.evaluate("window.next()")
        expect(waiting).to_contain_text(re.compile(r"waiting for 2 other answers\s*· [12] s"))
        v.keep("waiting")
        page.evaluate("window.next()")
        expect(waiting).to_contain_text(re.compile(r"reading\s*· [12] s"))
        page.evaluate("window.next()")
        expect(page.locator(DONE)).to_contain_text("word")
        expect(waiting).to_have_count(0)


@pytest.mark.parametrize("exact", [20, 800])
def test_an_answer_is_called_sooner_only_where_passages_were_reused(
    visit: Visiting, tiny: KbServer, exact: int
) -> None:
    """How long an answer takes is not in a test's hands, so the reply is made in the browser."""
    tokens = {"exact": exact, "reused": 0, "recomputed": 0, "computed": 1000 - exact}
    timeline = {"queue": 1, "first_token": 999, "waiting": 0, "searching": 0, "loading": 200}
    timeline |= {"computing": 800, "answering": 500, "total": 1499}
    body = reply_with(timeline, 1500, tokens)
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(content_type="text/event-stream", body=body),
        )
        ask(page, "hello?")
        timing = page.locator(".timing")
        expect(timing).to_contain_text("full prefill: about 1.50 s")
        expect(timing).to_contain_text("exact")
        expect(timing.get_by_text("1.5× sooner")).to_have_count(int(exact > 100))


def test_every_published_mode_can_be_chosen_under_more(
    visit: Visiting, tiny: KbServer, notes: str
) -> None:
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        page.get_by_label("Knowledge base").select_option(notes)
        page.get_by_text("More", exact=True).click()
        mode = page.locator(".modes select")
        names = mode.locator("option").evaluate_all("all => all.map((one) => one.value)")
        assert names[1:] == list(REUSES)
        sent: list[dict[str, object]] = []
        page.on(
            "request",
            lambda request: (
                sent.append(json.loads(request.post_data or "{}"))
                if request.url.endswith("/chat/completions")
                else None
            ),
        )
        mode.select_option("qcfuse:sink")
        expect(page.locator("#dial-words")).to_contain_text("qcfuse:sink")
        page.get_by_label("Recompute %").fill("40")
        ask(page, "what does a quota limit?")
        expect(page.locator(DONE)).to_have_count(1)
        assert sent[0]["reuse"] == {"strategy": "qcfuse:sink", "ratio": 0.4}
        mode.select_option("epic:16")
        expect(page.get_by_label("Recompute %")).to_have_count(0)
        ask(page, "what is a taint?")
        expect(page.locator(DONE)).to_have_count(2)
        assert sent[1]["reuse"] == {"strategy": "epic:16", "ratio": None}
        page.get_by_label("exact", exact=True).check(force=True)
        expect(mode).to_have_value("")
        ask(page, "and pods?")
        expect(page.locator(DONE)).to_have_count(3)
        assert sent[2]["reuse"] == "prefix"
