"""The renderer of a model's markdown: what becomes which element."""

import pytest
from playwright.sync_api import expect

from worlds.browsing import Visiting
from worlds.serving import KbServer

DRAW = """async (text) => {
  const { Markdown } = await import("/ui/js/markdown.js");
  const { h, render } = await import("/ui/js/html.js");
  const box = document.createElement("div");
  render(h(Markdown, { text, cite: (n) => (n === 1 ? h("sup", null, n) : null) }), box);
  return box.firstChild.innerHTML; }"""

CASES = {
    "a *b* **c** `d` _e_": "<p>a <em>b</em> <strong>c</strong> <code>d</code> <em>e</em></p>",
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    "- a\n- b\n  - c": "<ul><li>a</li><li><p>b</p><ul><li>c</li></ul></li></ul>",
    "3. x\n4. y": '<ol start="3"><li>x</li><li>y</li></ol>',
    "```py\na < b\n```": '<pre tabindex="0"><code>a &lt; b</code></pre>',
    "```\nunfinished": '<pre tabindex="0"><code>unfinished</code></pre>',
    "> a\n> b": "<blockquote><p>a\nb</p></blockquote>",
    "as said [1] and [2]": "<p>as said <sup>1</sup> and [2]</p>",
    "a\n\nb": "<p>a</p><p>b</p>",
    "---": "<hr>",
    "<b>x</b> & y": "<p>&lt;b&gt;x&lt;/b&gt; &amp; y</p>",
    "![a](https://x.example/y.png)": '<p><span class="md-image">[image: a]</span></p>',
    "[a](relative)": "<p>[a](relative)</p>",
    r"\*not\*": "<p>*not*</p>",
    "**open": "<p>**open</p>",
}
LINK = '<a href="https://x.example/" target="_blank" rel="noopener noreferrer nofollow">'


def test_markdown_becomes_elements(visit: Visiting, tiny: KbServer) -> None:
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        expect(page.locator("main h1")).to_be_visible()
        drawn = {text: page.evaluate(DRAW, text) for text in CASES}
        assert drawn == CASES
        assert page.evaluate(DRAW, "[a](https://x.example/)") == f"<p>{LINK}a</a></p>"
        assert page.evaluate(DRAW, "see https://x.example/.") == (
            f"<p>see {LINK}https://x.example/</a>.</p>"
        )
        table = page.evaluate(DRAW, "| a | b |\n|---|---|\n| 1 | *2* |")
        assert "<th>a</th><th>b</th>" in table
        assert "<td>1</td><td><em>2</em></td>" in table


@pytest.mark.parametrize("piece", ["*", "[", "`", "> ", "_a", "|-", "- ", "](", "~~a"])
def test_no_text_takes_long_to_draw(visit: Visiting, tiny: KbServer, piece: str) -> None:
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        expect(page.locator("main h1")).to_be_visible()
        clock = """async (text) => {
          const at = performance.now();
          await (DRAW)(text);
          return performance.now() - at; }"""
        took = page.evaluate(clock.replace("DRAW", DRAW), piece * 9_000)
        assert took < 2_000
