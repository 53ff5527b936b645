"""The clients of soak/run.py: what they send, and what a well-formed reply is."""

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

WORDS = ["node", "pod", "drain", "cordon", "evict", "quota", "volume", "claim", "label", "probe"]
MALFORMED = [b"", b"{", b"[]", b"\xff\xfe", b'{"messages": 5}', b"[" * 5000]
KEYS = 24  # documents that uploads write over, so that the knowledge base stays one size
BUSY = {429, 503}


class Soak:
    """All clients of one run. One event loop, one thread."""

    def __init__(self, http: httpx.AsyncClient, url: str, seed: int, stuck_s: float) -> None:
        self._http = http
        self._url = url
        self._rng = random.Random(seed)
        self._stuck_s = stuck_s
        self.taken_ms: dict[str, list[float]] = defaultdict(list)
        self.statuses: Counter[str] = Counter()
        self.faults: list[str] = []
        self.end: dict[str, float] = {}
        # what a client may do, and how often
        self._kinds: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.chat, 4),
            (self.stream, 6),
            (self.leave, 5),
            (self.fused, 6),
            (self.choices, 2),
            (self.completion, 2),
            (self.embed, 1),
            (self.search, 2),
            (self.upload_text, 2),
            (self.upload_file, 1),
            (self.delete, 1),
            (self.oversize, 1),
            (self.malformed, 3),
            (self.half_body, 1),
            (self.look, 1),
        ]

    async def prepare(self) -> None:
        """Fill the knowledge base; the first embedding loads the embedder."""
        for key in range(KEYS):
            body = {"title": f"Note {key}", "text": self._text(60), "key": str(key)}
            reply = await self._http.post("/v1/kb/soak/documents", json=body)
            assert reply.status_code == 200, reply.text
        await self.embed()
        self.statuses.clear()

    async def client(self, number: int, until_s: float) -> None:
        kinds, weights = zip(*self._kinds, strict=True)
        while time.monotonic() < until_s:
            kind = self._rng.choices(kinds, weights)[0]
            began_s = time.perf_counter()
            try:
                async with asyncio.timeout(self._stuck_s):
                    await kind()
            except TimeoutError:
                self.faults.append(f"{kind.__name__} is stuck")
            except (AssertionError, httpx.HTTPError, OSError, ValueError) as error:
                self.faults.append(f"{kind.__name__}: {type(error).__name__} {error}"[:400])
            self.taken_ms[kind.__name__].append((time.perf_counter() - began_s) * 1e3)

    async def settle(self) -> None:
        """Wait until nothing runs, then note what is still held."""
        give_up_s = time.monotonic() + 60
        while True:
            health = (await self._http.get("/healthz")).json()
            busy = health["running"] + health["waiting"] + health["pinned"]
            if not busy or time.monotonic() > give_up_s:
                break
            await asyncio.sleep(0.2)
        self.end = {name: health[name] for name in ("running", "waiting", "pinned", "failed")}
        for line in (await self._http.get("/metrics")).text.splitlines():
            name, _, value = line.rpartition(" ")
            if name in (
                "kvweave_engine_running",
                "kvweave_engine_waiting",
                "kvweave_engine_parked",
            ):
                self.end[name] = float(value)
        self.faults += [
            f"{name} is {value} at the end" for name, value in self.end.items() if value
        ]

    # ── what clients do ──────────────────────────────────────────────────────

    async def chat(self) -> None:
        reply = await self._post("chat/completions", self._asking())
        if reply.status_code == 200:
            body = reply.json()
            assert body["choices"][0]["finish_reason"] in ("stop", "length"), body
            assert body["usage"]["completion_tokens"] > 0, body

    async def stream(self) -> None:
        await self._stream(self._asking())

    async def fused(self) -> None:
        reuse = self._rng.choice(["auto", "reuse", "weave", "prefix", "full"])
        extra = {"kb": "soak", "k": 3, "reuse": reuse, "explain": True}
        await self._stream({**self._asking(), **extra})

    async def choices(self) -> None:
        await self._stream({**self._asking(), "n": 3})

    async def leave(self) -> None:
        """Hang up in front of the answer, or in the middle of it."""
        body = {**self._asking(), "max_tokens": 400, "stream": True}
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            self.statuses[str(reply.status_code)] += 1
            num_lines = self._rng.randrange(6)
            async for _ in reply.aiter_lines():
                if not num_lines:
                    return
                num_lines -= 1

    async def completion(self) -> None:
        body = {"prompt": [self._text(4), self._text(3)], "max_tokens": 6}
        reply = await self._post("completions", body)
        if reply.status_code == 200:
            assert len(reply.json()["choices"]) == 2, reply.text

    async def embed(self) -> None:
        reply = await self._post("embeddings", {"input": [self._text(5), self._text(9)]})
        if reply.status_code == 200:
            assert len(reply.json()["data"]) == 2

    async def search(self) -> None:
        reply = await self._post("kb/soak/search", {"query": self._text(4), "k": 3})
        if reply.status_code == 200:
            assert all(hit["text"] for hit in reply.json()["data"]), reply.text

    async def upload_text(self) -> None:
        key = str(self._rng.randrange(KEYS))
        body = {"title": f"Note {key}", "text": self._text(60), "key": key}
        await self._post("kb/soak/documents", body)

    async def upload_file(self) -> None:
        name = f"{'../' * self._rng.randrange(3)}file{self._rng.randrange(4)}.md"
        files = {"file": (name, f"# File\n\n{self._text(50)}".encode())}
        reply = await self._http.post("/v1/kb/soak/documents", files=files)
        self._check(reply, {200})

    async def delete(self) -> None:
        reply = await self._http.get("/v1/kb/soak/documents")
        self._check(reply, {200})
        if reply.status_code == 200 and (documents := reply.json()["data"]):
            chosen = self._rng.choice(documents)["id"]
            gone = await self._http.delete(f"/v1/kb/soak/documents/{chosen}")
            self._check(gone, {200, 404})  # another one may have been first

    async def oversize(self) -> None:
        path, body = "/v1/chat/completions", b'{"messages": "' + b"x" * 400_000 + b'"}'
        headers = {"Content-Type": "application/json"}
        reply = await self._http.post(path, content=body, headers=headers)
        self._check(reply, {413})

    async def malformed(self) -> None:
        headers = {"Content-Type": "application/json"}
        content = self._rng.choice(MALFORMED)
        path = self._rng.choice(
            ["chat/completions", "completions", "kb/soak/search", "kb/soak/documents"]
        )
        self._check(await self._http.post(f"/v1/{path}", content=content, headers=headers), {400})

    async def half_body(self) -> None:
        """Promise a body, send half of it, and go."""
        host, port = self._url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"
        writer.write(head)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def look(self) -> None:
        for path in ("/healthz", "/readyz", "/metrics", "/v1/models", "/v1/kb"):
            self._check(await self._http.get(path), {200})

    # ── how ──────────────────────────────────────────────────────────────────

    def _text(self, num_words: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=num_words)).capitalize() + "."

    def _asking(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": self._text(6)}]
        return {"messages": messages, "max_tokens": self._rng.randrange(1, 24)}

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        reply = await self._http.post(f"/v1/{path}", json=body)
        self._check(reply, {200})
        return reply

    async def _stream(self, body: dict[str, Any]) -> None:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        reply = await self._http.post("/v1/chat/completions", json=body)
        self._check(reply, {200})
        if reply.status_code != 200:
            return
        lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]", lines[-1][:300]
        chunks = [json.loads(line) for line in lines[:-1]]
        ends = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert len(ends) == body.get("n", 1), ends
        assert chunks[-1]["usage"]["completion_tokens"] > 0, chunks[-1]

    def _check(self, reply: httpx.Response, wanted: set[int]) -> None:
        """A status that fits, and JSON of the right shape where it is a refusal."""
        status = reply.status_code
        self.statuses[str(status)] += 1
        assert reply.headers.get("x-request-id"), "a reply without an id"
        assert status in wanted | BUSY, f"{status} {reply.text[:300]}"
        if status in BUSY:
            assert reply.headers.get("retry-after"), "it does not say when to come back"
        if status >= 400:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}, reply.text
