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
    "*a **b** c*": "<p><em>a <strong>b</strong> c</em></p>",
    "***a***": "<p><em><strong>a</strong></em></p>",
    "*a [b* c](relative)": "<p><em>a [b</em> c](relative)</p>",
    "``a`b``": "<p><code>a`b</code></p>",
    "~~a~~ ~b~": "<p><del>a</del> ~b~</p>",
    "So wide![1]": "<p>So wide!<sup>1</sup></p>",
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


LONG = 300_000  # characters
PIECES = [
    *("_a ", "*a ", "*", "_*", "[", "](", "![", "[a](http://x", "http://[", "`", "`a``", "~~a"),
    *("> ", "- ", "  - a\n", "1. a\n\n", "|-", "# a\n", "```\n\n```\n", "a\n", " ", "a"),
]
TEXTS = {piece: piece * (LONG // len(piece)) for piece in PIECES} | {
    "a wide head and many rows": "|" * 50_000 + "\n" + "-|" * 50_000 + "\n" + "|\n" * 50_000,
    "runs of backticks, each longer": "".join("`" * n + "a" for n in range(1, 700)),
    "a url with many stops": "http://x" + "." * LONG + "a",
}
CLOCK = """async (text) => {
  const { drawMarkdown } = await import("/ui/js/markdown.js");
  const start = performance.now();
  drawMarkdown(text);
  const parsed = performance.now() - start;
  const again = performance.now();
  await (DRAW)(text.slice(0, 30_000));
  return Math.max(parsed, performance.now() - again); }""".replace("DRAW", DRAW)


@pytest.mark.parametrize("name", TEXTS)
def test_no_text_takes_long_to_draw(visit: Visiting, tiny: KbServer, name: str) -> None:
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        expect(page.locator("main h1")).to_be_visible()
        assert page.evaluate(CLOCK, TEXTS[name]) < 5_000  # a square of the length would show


def test_blocks_that_are_finished_are_not_drawn_again(visit: Visiting, tiny: KbServer) -> None:
    stream = """async () => {
      const { Markdown } = await import("/ui/js/markdown.js");
      const { h, render } = await import("/ui/js/html.js");
      const box = document.createElement("div");
      const cited = [];
      const cite = (n) => { cited.push(n); return h("sup", null, n); };
      let text = "";
      for (const piece of ["First [1].\\n\\n", "- second [2]\\n\\n", "Third", " goes", " on [3]"]) {
        text += piece;
        render(h(Markdown, { text, cite }), box);
      }
      return [cited, box.textContent]; }"""
    with visit(tiny.url) as v:
        page = v.go("chat/new")
        expect(page.locator("main h1")).to_be_visible()
        assert page.evaluate(stream) == [[1, 2, 3], "First 1.second 2Third goes on 3"]
