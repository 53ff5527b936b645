"""A browser for tests of the web page, and what it must not do on the way."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ARTEFACTS = Path(__file__).resolve().parents[2] / "build" / "ui"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 30_000  # two cores, and others on them
WIDE = {"width": 1440, "height": 900}
NARROW = {"width": 360, "height": 740}


def chromium() -> str:
    """The browser on PATH. Never skipped: a suite without one shows nothing about the page."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    raise RuntimeError("no Chromium on PATH; run: make test-ui")


@contextmanager
def running_browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-dev-shm-usage"]  # as root, in a small container
        browser = playwright.chromium.launch(executable_path=chromium(), args=options)
        yield browser
        browser.close()


class Visit:
    """One page with everything it asked for and complained about."""

    def __init__(self, page: "Page", origin: str) -> None:
        self.page = page
        self.origin = origin
        self.requests: list[str] = []
        self.complaints: list[str] = []  # errors of scripts, of the console, of the policy
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(f"script: {error}"))
        page.on("console", self._heard)

    def _heard(self, message: Any) -> None:
        # a refusal of the server is an answer that the page shows; the browser logs it as an error
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(f"console: {message.text}")

    def strangers(self) -> list[str]:
        """Requests to anybody but the server."""
        own = (self.origin, "data:", "about:", "blob:")
        return [url for url in self.requests if not url.startswith(own)]

    def go(self, place: str = "") -> "Page":
        self.page.goto(f"{self.origin}/{f'#/{place}' if place else ''}")
        return self.page

    def check(self) -> None:
        assert self.strangers() == []
        assert self.complaints == []

    def keep(self, name: str) -> Path:
        """A screenshot for people, in `build/ui`."""
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        path = ARTEFACTS / f"{re.sub('[^a-z0-9-]+', '-', name)}.png"
        self.page.screenshot(path=str(path))
        return path


@contextmanager
def visiting(browser: "Browser", origin: str, **options: Any) -> Iterator[Visit]:
    """A fresh profile before the server at `origin`; what it did is checked at the end."""
    context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
    context.set_default_timeout(PATIENCE_MS)
    visit = Visit(context.new_page(), origin)
    try:
        yield visit
        visit.check()
    finally:
        context.close()


Visiting = Callable[..., AbstractContextManager[Visit]]  # of a server's address
