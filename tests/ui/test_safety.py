"""Nothing leaves the origin, nothing inline runs, and text stays text."""

import json
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from kvweave.serve.access.api_keys import parse_keys
from kvweave.serve.routes.context import PageConfig
from worlds.browsing import Visiting
from worlds.serving import KbServer, make_libraries, serving

MOST_BYTES = 300_000  # of the first load, compressed

PWN = "window.pwned = 1"
ATTACKS = [
    f"<script>{PWN}</script>",
    f"<img src=x onerror='{PWN}'>",
    f"<svg onload='{PWN}'><animate onbegin='{PWN}' attributeName=x dur=1s></svg>",
    f"<iframe srcdoc='<script>parent.{PWN}</script>'></iframe>",
    f"<a href='javascript:{PWN}'>click</a>",
    f"[click](javascript:{PWN})",
    f"[click](JaVaScRiPt:{PWN})",
    f"[click](java\tscript:{PWN})",
    f"[click](data:text/html,<script>{PWN}</script>)",
    f"[click](vbscript:{PWN})",
    "![beacon](https://evil.example/pixel.png)",
    '[x](https://evil.example/" onmouseover="window.pwned=1)',
    f"`<script>{PWN}</script>`",
    f"```html\n<script>{PWN}</script>\n```",
    f"| a | <img src=x onerror={PWN}> |\n|---|---|\n| <script>{PWN}</script> | b |",
    f"> <details open ontoggle={PWN}>",
    f"1. <body onload={PWN}>\n2. <style>@import 'https://evil.example/x.css';</style>",
    f"# <img src=x onerror={PWN}>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<form action=https://evil.example><button>go</button></form>",
    f"</textarea><script>{PWN}</script>",
    f"{{{{constructor.constructor('{PWN}')()}}}}",
    "<base href=https://evil.example/>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={PWN}>",
    "<<<<<<<<[[[[[[((((((*******_______```" * 40,
    "> " * 400 + "deep",
    "[" * 2000 + "](" * 500,
]
FOREIGN = "script, iframe, object, embed, link, base, style, form[action], img, details, math"


def harmless(page: Page) -> None:
    """Nothing of ATTACKS became an element, a handler or a script that ran."""
    told: dict[str, Any] = page.evaluate(
        """(foreign) => {
          const main = document.querySelector("main");
          const all = [...document.querySelectorAll("*")];
          // the page's own have a class, which no attack here gives itself
          const found = [...main.querySelectorAll(foreign)].filter(
            (e) => !e.matches("details.as-table, details.more, details.modes"));
          const known = ["http:", "https:", "mailto:"];
          return {
            pwned: window.pwned ?? null,
            handlers: all.flatMap((e) => e.getAttributeNames()).filter((n) => n.startsWith("on")),
            foreign: found.map((e) => e.outerHTML.slice(0, 90)),
            links: [...main.querySelectorAll("a")].map((a) => a.protocol)
              .filter((p) => !known.includes(p)),
          };
        }""",
        FOREIGN,
    )
    assert told == {"pwned": None, "handlers": [], "foreign": [], "links": []}


def test_markdown_of_a_model_stays_harmless(visit: Visiting, tiny: KbServer) -> None:
    """No model here writes attacks on request, so the reply is made in the browser."""

    def reply(route: Route) -> None:
        said = "\n\n".join(ATTACKS)
        parts = [said[at : at + 40] for at in range(0, len(said), 40)]
        events = [{"id": "x", "choices": [{"delta": {"content": part}}]} for part in parts]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    with visit(tiny.url) as v:
        page = v.go("chat/new")
        page.route("**/v1/chat/completions", reply)
        page.get_by_label("Your question").fill(ATTACKS[0])
        page.keyboard.press("Enter")
        answer = page.locator('.message.answer[data-state="done"]')
        expect(answer).to_contain_text(ATTACKS[1])
        harmless(page)
        links = answer.locator(".md a").evaluate_all("(all) => all.map((a) => [a.href, a.rel])")
        assert all("noopener" in rel and "noreferrer" in rel for _, rel in links), links
        page.reload()  # and from where it is kept
        expect(page.locator(".message.answer")).to_contain_text(ATTACKS[1])
        harmless(page)


def test_names_and_texts_of_documents_stay_harmless(visit: Visiting, empty: KbServer) -> None:
    files = [
        ("file", (f"{at} {attack[:60].replace('/', ' ')}.md", f"# {attack[:80]}\n\nnode {attack}"))
        for at, attack in enumerate(ATTACKS[:22])
    ]
    taken = httpx.post(f"{empty.url}/v1/kb/bad/documents", files=files, timeout=120)
    assert taken.json()["added"] == 22, taken.text
    with visit(empty.url) as v:
        page = v.go("documents/bad")
        expect(page.get_by_role("row")).to_have_count(23)
        harmless(page)
        page.get_by_label("Search bad").fill("node script img")
        page.get_by_role("button", name="Search").click()
        expect(page.locator(".hit").first).to_be_visible()
        harmless(page)
        page.locator(".hit a").first.click()
        expect(page.locator(".chunk-text")).to_contain_text("node")
        harmless(page)
        v.go("chat/new").get_by_label("Your question").fill("node script")
        page.keyboard.press("Enter")
        done = page.locator('.message.answer[data-state="done"]')
        expect(done.locator(".source").first).to_be_visible()
        harmless(page)
        page.get_by_role("button", name="Library").click()
        page.locator(".library-row").first.click()
        harmless(page)
        done.get_by_role("link", name="Details").click()
        expect(page.locator(".tokens[data-filled]")).to_contain_text("node")
        page.locator(".t").nth(40).hover()
        harmless(page)


def test_inline_scripts_and_eval_do_not_run(visit: Visiting, tiny: KbServer) -> None:
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        page.evaluate(
            """() => { window.broken = [];
              document.addEventListener("securitypolicyviolation",
                (e) => window.broken.push(e.effectiveDirective));
              const script = document.createElement("script");
              script.textContent = "window.pwned = 1";
              document.body.append(script);
              const picture = new Image();
              picture.src = "https://evil.example/pixel.png";
              document.body.append(picture);
              setTimeout("window.pwned = 2", 0); }"""
        )
        page.wait_for_function("window.broken.length >= 3")
        assert page.evaluate("window.pwned ?? null") is None
        assert {"script-src-elem", "img-src"} <= set(page.evaluate("window.broken"))
        v.complaints.clear()  # the policy complained, as it should
        v.requests[:] = [url for url in v.requests if "evil.example" not in url]  # blocked


def test_the_first_load_is_small(visit: Visiting, tiny: KbServer, notes: str) -> None:
    with visit(tiny.url) as v:
        sizes: list[int] = []
        v.page.on(
            "requestfinished",
            lambda request: sizes.append(
                request.sizes()["responseBodySize"] + request.sizes()["responseHeadersSize"]
            ),
        )
        page = v.go()
        expect(page.get_by_label("Your question")).to_be_visible()
        page.wait_for_load_state("networkidle")
        assert len(sizes) > 20, "modules were loaded"
        assert sum(sizes) < MOST_BYTES, sum(sizes)
        print(f"first load: {sum(sizes):,} bytes in {len(sizes)} requests")


def test_a_key_is_asked_for_and_kept_for_this_tab_alone(
    visit: Visiting, tiny: KbServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = parse_keys(["sk-right-one:acme"])
    libraries = make_libraries(tiny.weave, tmp_path_factory.mktemp("keyed"))
    with serving(tiny.weave, libraries=libraries, keys=keys) as url, visit(url) as v:
        page = v.go()
        expect(page.get_by_role("heading", name="Sign in to kvweave")).to_be_visible()
        v.keep("sign-in")
        page.get_by_label("API key").fill("sk-wrong-one")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("This key is not known here.")).to_be_visible()
        page.get_by_label("API key").fill("sk-right-one")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("button", name="Load the sample")).to_be_visible()
        stored = page.evaluate(
            "[JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie]"
        )
        assert ["sk-right-one" in each for each in stored] == [False, True, False]
        page.reload()
        expect(page.get_by_role("button", name="Load the sample")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in to kvweave")).to_be_visible()
        assert page.evaluate("sessionStorage.getItem('kvweave.key')") is None
    libraries.close()


def test_who_signs_in_behind_another_tenant_sees_nothing_of_it(
    visit: Visiting, tiny: KbServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = parse_keys(["sk-first-one:acme", "sk-second-one:other"])
    libraries = make_libraries(tiny.weave, tmp_path_factory.mktemp("shared"))
    config = PageConfig(conversations=tmp_path_factory.mktemp("said"))
    said = {"title": "The merger with Umbra", "messages": [], "updated": 1.0}
    with serving(tiny.weave, libraries=libraries, keys=keys, page=config) as url, visit(url) as v:
        own = {"Authorization": "Bearer sk-first-one"}
        httpx.put(f"{url}/v1/conversations/one", json=said, headers=own).raise_for_status()
        page = v.go()
        page.get_by_label("API key").fill("sk-first-one")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("The merger with Umbra")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("API key").fill("sk-second-one")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("button", name="Sign out")).to_be_visible()
        page.wait_for_load_state("networkidle")
        expect(page.get_by_text("The merger with Umbra")).to_have_count(0)
    libraries.close()
