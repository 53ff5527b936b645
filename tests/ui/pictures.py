"""Takes the pictures of README: the page as it comes, with the default model and right answers.

`make pictures` runs it on a machine that does nothing else, since the page shows how long answers
took. It starts a server with default settings over the packaged valley, waits until the KV of all
chunks is there, and asks until an answer is right and was made sooner by reuse.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # tests/ instead of this folder

import httpx
from playwright.sync_api import Page, expect

from kvweave.demo import PASSAGES, DemoQuestion, read_questions
from worlds.browsing import running_browser, visiting
from worlds.servers import free_port

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
ASKED = ("What was Jorun Pask's boat called?", "How wide is the track of the Vale Railway?")
COMPARED = ASKED[1]
DONE = '.message.answer[data-state="done"]'
PATIENCE_MS = 300_000
START_S = 600.0
MOST = 12  # questions that are tried besides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    out = parser.parse_args().out
    known = {each.question: each for each in read_questions()}
    others = [each for each in known.values() if each.question not in ASKED]
    questions = [known[question] for question in ASKED] + others[:MOST]
    with tempfile.TemporaryDirectory(prefix="kvweave-pictures-") as folder:
        port = free_port()
        command = [sys.executable, "-m", "kvweave", "serve", "--port", str(port)]
        server = subprocess.Popen([*command, "--kb-root", folder])
        try:
            url = f"http://127.0.0.1:{port}"
            fill(url)
            with running_browser() as browser:
                with visiting(browser, url, color_scheme="light") as visit:
                    asked = (take_answer(out, visit.go("chat/new"), each) for each in questions)
                    assert any(asked), "no right answer was fused: is the machine busy?"
                    take_comparison(out, visit.go("compare"), known[COMPARED])
                with visiting(browser, url, color_scheme="dark") as visit:
                    page = visit.go("documents/valley")
                    expect(page.locator(".documents-table")).to_be_visible()
                    keep(out, page, "ui-documents-dark")
        finally:
            server.terminate()
            server.wait()


def fill(url: str) -> None:
    """Bring the valley with its KV; a first question is not shown."""
    with httpx.Client(base_url=url) as http:
        wait_until_ready(http)
        files = [("file", (path.name, path.read_bytes())) for path in sorted(PASSAGES.glob("*.md"))]
        wait = {"wait_for_kv": True}
        reply = http.post("/v1/kb/valley/documents", files=files, params=wait, timeout=900)
        reply.raise_for_status()
        messages = [{"role": "user", "content": "Who repairs the bridge?"}]
        body = {"messages": messages, "kb": "valley", "max_tokens": 8}
        http.post("/v1/chat/completions", json=body, timeout=300).raise_for_status()


def wait_until_ready(http: httpx.Client) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with suppress(httpx.TransportError):  # it does not listen yet
            if http.get("/readyz").status_code == 200:
                return
        time.sleep(0.5)
    raise SystemExit("the server was not ready in time")


def take_answer(out: Path, page: Page, question: DemoQuestion) -> bool:
    """Chat, and the answer token by token; False where it is wrong or nothing was fused for it."""
    page.get_by_label("Knowledge base").select_option("valley")
    page.get_by_label("Your question").fill(question.question)
    page.keyboard.press("Enter")
    expect(page.locator(DONE)).to_have_count(1, timeout=PATIENCE_MS)
    answer = page.locator(DONE)
    expect(answer.locator(".timing")).to_contain_text("to the first token")
    text = answer.inner_text()
    if not question.is_answered_by(text) or not ("sooner" in text and "weave" in text):
        return False
    keep(out, page, "ui-chat")
    answer.get_by_role("link", name="Details").click()
    expect(page.locator(".tokens[data-filled]")).to_be_visible()
    keep(out, page, "ui-details")
    return True


def take_comparison(out: Path, page: Page, question: DemoQuestion) -> None:
    page.get_by_label("Knowledge base").select_option("valley")
    page.get_by_label("Question").fill(question.question)
    page.get_by_role("button", name=re.compile("Run . ways")).click()
    ways = page.locator(".way")
    for at in range(ways.count()):
        facts = ways.nth(at).locator("dl.facts")
        expect(facts).to_contain_text("First token", timeout=PATIENCE_MS)
        assert question.is_answered_by(ways.nth(at).inner_text())
    keep(out, page, "ui-compare")


def keep(out: Path, page: Page, name: str) -> None:
    path = out / f"{name}.png"
    page.screenshot(path=str(path))
    print(path, flush=True)


if __name__ == "__main__":
    main()
