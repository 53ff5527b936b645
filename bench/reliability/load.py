"""Clients that change and ask a knowledge base over HTTP until its server is killed under them."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import httpx

from reliability.crash_world import KB
from reliability.ledger import Ledger
from reliability.notes import Version, fault_in, versions_in

KEYS = 24  # notes that are written over and over: the knowledge base stays one size
BUSY = (429, 503)
Mark = Callable[[str], None]  # hears of what is begun and acknowledged, in that order


def no_mark(_: str) -> None:
    """Nobody listens."""


class Load:
    """A few clients with a thread each. A note belongs to one of them, so that its changes come one
    after the other."""

    def __init__(
        self, url: str, ledger: Ledger, seed: int, clients: int = 3, mark: Mark = no_mark
    ) -> None:
        self._url = url
        self._ledger = ledger
        self._seed = seed
        self._mark = mark
        self._num_clients = clients
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.refused: list[str] = []  # replies that say of trouble where there is none

    def start(self) -> None:
        for number in range(self._num_clients):
            thread = threading.Thread(target=self._run, args=(number,), daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def changes(self) -> int:
        """That were acknowledged."""
        return self.done["upload"] + self.done["delete"]

    def wait_for(self, num_changes: int, timeout_s: float) -> None:
        """Until so many were acknowledged, or the time is over."""
        give_up_s = time.monotonic() + timeout_s
        while self.changes < num_changes and time.monotonic() < give_up_s:
            time.sleep(0.002)

    def stop(self) -> None:
        """Returns when no client has anything under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def run_for(self, num_changes: int) -> None:
        """In this thread, until that many changes were acknowledged."""
        client = _Client(self, random.Random(f"{self._seed}/alone"), range(KEYS))
        with httpx.Client(base_url=self._url, timeout=120) as http:
            while self.changes < num_changes:
                client.act(http)

    def _run(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        client = _Client(self, rng, range(number, KEYS, self._num_clients))
        with httpx.Client(base_url=self._url, timeout=120) as http, suppress(httpx.HTTPError):
            while not self._stop.is_set():
                client.act(http)

    # ── for clients ──────────────────────────────────────────────────────────

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    def mark(self, words: str) -> None:
        self._mark(words)


class _Client:
    """What one of them does. A connection that breaks leaves what was begun in doubt."""

    def __init__(self, load: Load, rng: random.Random, keys: range) -> None:
        self._load = load
        self._rng = rng
        self._keys = list(keys)
        self._ids: dict[int, str] = {}  # documents, by note

    def act(self, http: httpx.Client) -> None:
        kinds = (self.upload, self.delete, self.search, self.chat)
        self._rng.choices(kinds, (7, 4, 3, 2))[0](http)

    def upload(self, http: httpx.Client) -> None:
        """A new version of a note, or a first one: as a text, of some notes as a file in a form."""
        version = self._next()
        path, key = f"/v1/kb/{KB}/documents", version.key
        query = {"wait_for_kv": self._rng.random() < 0.2}
        if key % 6 == 5:
            content = f"# {version.title}\n\n{version.text}\n".encode()
            files = {"file": (f"note{key}.md", content)}
            ask = partial(http.post, path, files=files, params=query)
        else:
            body = {"title": version.title, "text": version.text, "key": str(key)}
            ask = partial(http.post, path, json=body, params=query)
        self._change(key, version, ask, "upload")

    def delete(self, http: httpx.Client) -> None:
        key = self._rng.choice(self._keys)
        version = self._load.ledger.now(key)
        if version is None:
            return
        reply = http.get(f"/v1/kb/{KB}/documents")
        if reply.status_code != 200:
            return
        ids = [d["id"] for d in reply.json()["data"] if version in versions_in(d["title"])]
        if len(ids) != 1:
            self._load.wrong.append(f"{version.mark} is listed {len(ids)} times")
            return
        self._change(key, None, lambda: http.delete(f"/v1/kb/{KB}/documents/{ids[0]}"), "delete")

    def search(self, http: httpx.Client) -> None:
        gone = self._load.ledger.gone()
        version = self._load.ledger.now(self._rng.choice(self._keys))
        if version is None:
            return
        retrieval = self._rng.choice(["vector", "words", "hybrid"])
        body = {"query": f"{version.mark} drain a node", "k": 3, "retrieval": retrieval}
        reply = http.post(f"/v1/kb/{KB}/search", json=body)
        if self._is_fine(reply, "search"):
            for hit in reply.json()["data"]:
                self._judge(hit["text"], hit["title"], gone)

    def chat(self, http: httpx.Client) -> None:
        gone = self._load.ledger.gone()
        reuse = self._rng.choice(["auto", "weave", "reuse", "full"])
        body = {
            "messages": [{"role": "user", "content": "how do I drain a node?"}],
            "kb": KB,
            "k": 3,
            "reuse": reuse,
            "max_tokens": 4,
            "temperature": 0,
        }
        reply = http.post("/v1/chat/completions", json=body)
        if reply.status_code == 404:
            return  # nothing was uploaded yet
        if self._is_fine(reply, "chat"):
            for source in reply.json().get("sources") or ():
                for version in versions_in(source["title"]) & gone:
                    self._load.wrong.append(f"an answer was made from {version.mark}, deleted")

    # ── how ──────────────────────────────────────────────────────────────────

    def _next(self) -> Version:
        return self._load.ledger.next_version(self._rng.choice(self._keys))

    def _change(
        self, key: int, state: Version | None, ask: Callable[[], httpx.Response], kind: str
    ) -> None:
        load, ledger = self._load, self._load.ledger
        ledger.begin(key, state)
        load.mark(f"begin {key} {'-' if state is None else state.number}")
        reply = ask()
        if reply.status_code == 200:
            ledger.acknowledge(key)
            load.mark(f"ack {key}")
            load.done[kind] += 1
        elif reply.status_code in BUSY or reply.status_code == 409:
            ledger.refuse(key)
            load.mark(f"refuse {key}")
            time.sleep(0.05)
        else:
            load.refused.append(f"{kind}: {reply.status_code} {reply.text[:200]}")

    def _is_fine(self, reply: httpx.Response, kind: str) -> bool:
        if reply.status_code == 200:
            self._load.done[kind] += 1
            return True
        if reply.status_code not in (*BUSY, 404):
            self._load.refused.append(f"{kind}: {reply.status_code} {reply.text[:200]}")
        return False

    def _judge(self, text: str, title: str, gone: set[Version]) -> None:
        """What was gone before the request was sent must not be in its reply."""
        found = versions_in(f"{title} {text}")
        if found & gone:
            self._load.wrong.append(f"{min(found & gone).mark} was served, which was deleted")
        elif fault := fault_in(text, title, found):
            self._load.wrong.append(fault)
