"""Tenants apart: what one can learn of another over HTTP, by looking and by timing.

Every check is something a tenant could do to learn of another's documents, or to harm them. The
timing test asks whether a tenant can tell which texts another one has cached: it uploads texts of
both kinds itself and times its answers; the two sets of times must look alike (Mann-Whitney). The
control shows that the test would see it: the other tenant's own times differ.
"""

import math
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from reliability.fault_server import FaultServer
from reliability.fault_world import COMMON, TOPICS, WORLD, FaultWorld, make_world

KEYS = {"anna": "key-of-anna", "bert": "key-of-bert", "": "key-of-nobody"}
SECRET = "amber anvil apple arrow"
SIGNIFICANT = 0.01  # chance of two sets of times as different as these, if nothing differs


class Checks:
    """What was tried, and what leaked."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, about: str, what: str, is_apart: bool, seen: str = "") -> None:
        self.rows.append({"about": about, "what": what, "apart": is_apart, "seen": seen[:200]})
        print(f"{'ok  ' if is_apart else 'LEAK'} {about}: {what} {seen[:100]}", flush=True)


class Tenant:
    def __init__(self, url: str, name: str) -> None:
        headers = {"Authorization": f"Bearer {KEYS[name]}"}
        self.name = name
        self.http = httpx.Client(base_url=url, headers=headers, timeout=120)

    def upload(self, kb: str, title: str, text: str, *, kv: bool = False) -> httpx.Response:
        body = {"title": title, "text": text, "key": title}
        return self.http.post(f"/v1/kb/{kb}/documents", json=body, params={"wait_for_kv": kv})

    def ask(self, kb: str, question: str, **more: Any) -> httpx.Response:
        body = {
            "messages": [{"role": "user", "content": question}],
            "kb": kb,
            "k": 1,
            "max_tokens": 1,
            "temperature": 0,
            "explain": True,
            **more,
        }
        return self.http.post("/v1/chat/completions", json=body)

    def first_token_s(self, kb: str, question: str, **more: Any) -> float:
        """As the client sees it: from the request to the whole reply of one token."""
        began_s = time.perf_counter()
        reply = self.ask(kb, question, **more)
        taken_s = time.perf_counter() - began_s
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code} {reply.text[:200]}")
        return taken_s


def run_tenants(folder: Path, model: str | None = None, pairs: int = 40) -> dict[str, Any]:
    """`model` None is the tiny one, whose times tell little."""
    world = make_world(WORLD)
    checks = Checks()
    server = FaultServer(
        folder / "server",
        Path(model) if model else world.model,
        world.embedder,
        {
            "KVWEAVE_API_KEYS": ",".join(
                f"{key}:{name}" if name else key for name, key in KEYS.items()
            ),
            "KVWEAVE_LIBRARY_BACKGROUND_KV": "never",
            "KVWEAVE_LIBRARY_PROMOTION": "0",
            "KVWEAVE_QUALITY_AUDIT_SHARE": "0",
            "KVWEAVE_SERVER_TENANT_KBS": "4",
            "KVWEAVE_SERVER_TENANT_BYTES": str(8 << 20),
            "KVWEAVE_SERVER_OPEN_KBS": "8",
        },
        hooked=False,
    )
    server.start()
    try:
        anna, bert, nobody = (Tenant(server.url, name) for name in KEYS)
        look(checks, server.url, anna, bert, nobody, world)
        quotas(checks, anna, bert)
        times = timing(checks, anna, bert, pairs)
    finally:
        server.stop()
    return {"rows": checks.rows, **times, "tenant_leaks": sum(not r["apart"] for r in checks.rows)}


def look(
    checks: Checks, url: str, anna: Tenant, bert: Tenant, nobody: Tenant, world: FaultWorld
) -> None:
    document = world.base[0]
    for tenant in (anna, nobody):
        assert tenant.upload("notes", "Base", document.text, kv=True).status_code == 200
    told = anna.ask("notes", document.question, conversation_id="c1", reuse="reuse").json()
    (own,) = anna.http.get("/v1/kb/notes/documents").json()["data"]
    for other in (bert, nobody):
        of = other.name or "no tenant"
        kbs = [kb["name"] for kb in other.http.get("/v1/kb").json()["data"]]
        if other is bert:
            checks.add("content", "knowledge bases listed", kbs == [], str(kbs))
        for method, path in (
            ("GET", "/v1/kb/notes"),
            ("GET", "/v1/kb/notes/documents"),
            ("GET", f"/v1/kb/notes/documents/{own['id']}"),
            ("DELETE", f"/v1/kb/notes/documents/{own['id']}"),
            ("POST", "/v1/kb/notes/search"),
            ("DELETE", "/v1/kb/notes"),
        ):
            if other is nobody:
                continue  # has a knowledge base of that name itself
            body = {"query": SECRET} if method == "POST" else None
            reply = other.http.request(method, path, json=body)
            is_apart = reply.status_code == 404 and SECRET not in reply.text
            seen = f"{reply.status_code} {reply.text}"
            checks.add(
                "content", f"{method} {path.replace(own['id'], 'ID')} by {of}", is_apart, seen
            )
        kept = other.http.get(f"/v1/answers/{told['id']}")
        checks.add("content", f"a kept answer by {of}", kept.status_code == 404, kept.text)
        listed = other.http.get("/v1/answers").text
        checks.add("content", f"kept answers listed by {of}", told["id"] not in listed, listed)
    asked = bert.ask("notes", document.question)
    checks.add(
        "content", "a chat that names the knowledge base", asked.status_code == 404, asked.text
    )
    assert anna.http.get("/v1/kb/notes/documents").json()["data"], "it was deleted by another"

    # metrics
    for page, of in (
        (bert.http.get(f"{url}/metrics", timeout=60).text, "another tenant"),
        (httpx.get(f"{url}/metrics", timeout=60).text, "a stranger"),
    ):
        checks.add("metrics", f"read by {of}", "anna" not in page and "notes" not in page)

    # explain: the same text, whose KV anna has
    assert bert.upload("mine", "Copy", document.text).status_code == 200
    explain = bert.ask("mine", document.question, reuse="reuse").json()["explain"]
    tiers = [chunk["tier"] for chunk in explain["chunks"]]
    fresh = explain["tokens"]["reused"] == 0 and not any(tiers)
    checks.add("explain", "nothing of another's KV is reused", fresh, str(explain["tokens"]))

    # deletions: anna removes her copy, bert's answers and counts stay
    first = bert.ask("mine", document.question, conversation_id="b1").json()
    before = bert.http.get("/v1/kb/mine").json()["tokens"]
    assert anna.http.delete(f"/v1/kb/notes/documents/{own['id']}").status_code == 200
    again = bert.ask("mine", document.question, conversation_id="b1").json()
    fresh_again = bert.ask("mine", document.question).json()
    same = fresh_again["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    checks.add("deletions", "another's prompt stays as long", same)
    kept_history = again["usage"]["prompt_tokens"] >= first["usage"]["prompt_tokens"]
    checks.add("deletions", "another's conversation keeps its chunks", kept_history)
    after = bert.http.get("/v1/kb/mine").json()["tokens"]
    checks.add("deletions", "another's counts stay", before == after, f"{before} {after}")
    gone = anna.ask("notes", document.question).json()
    is_gone = SECRET not in str(gone.get("sources"))
    checks.add("deletions", "the document is gone for its owner", is_gone)


def quotas(checks: Checks, anna: Tenant, bert: Tenant) -> None:
    statuses = [anna.upload(f"q{n}", "x", "a note").status_code for n in range(5)]
    checks.add(
        "quotas", "knowledge bases of one tenant end at its quota", 403 in statuses, str(statuses)
    )
    other = bert.upload("q0", "x", "a note").status_code
    checks.add("quotas", "another tenant is not counted with it", other == 200, str(other))
    for n in range(4):
        anna.http.delete(f"/v1/kb/q{n}")
    bert.http.delete("/v1/kb/q0")


def timing(checks: Checks, anna: Tenant, bert: Tenant, pairs: int) -> dict[str, Any]:
    """Texts of which anna has cached half. Bert has all of them, without KV."""
    rng = random.Random(7)
    texts = [_text(rng) for _ in range(2 * pairs)]
    cached = set(rng.sample(range(len(texts)), pairs))
    for number, text in enumerate(texts):
        question = text.partition(".")[0]
        if number in cached:
            assert anna.upload("warm", f"T{number}", text, kv=True).status_code == 200
        assert bert.upload("cold", f"T{number}", text).status_code == 200
    for number in cached:
        anna.first_token_s("warm", texts[number].partition(".")[0], reuse="reuse")
    order = list(range(len(texts)))
    rng.shuffle(order)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in order:
        question = texts[number].partition(".")[0]
        times[number in cached].append(bert.first_token_s("cold", question, reuse="reuse"))
    p = rank_test(times[True], times[False])
    checks.add("timing", "which texts another has cached", p >= SIGNIFICANT, f"p = {p:.3f}")
    # the control: anna's own second asking of what she has, against what she has not
    fresh = [_text(rng) for _ in range(pairs)]
    for number, text in enumerate(fresh):
        assert anna.upload("fresh", f"F{number}", text).status_code == 200
    own: dict[bool, list[float]] = {True: [], False: []}
    for number, text in zip(sorted(cached), fresh, strict=True):
        warm = texts[number].partition(".")[0]
        own[True].append(anna.first_token_s("warm", warm, reuse="reuse"))
        own[False].append(anna.first_token_s("fresh", text.partition(".")[0], reuse="reuse"))
    control = rank_test(own[True], own[False])
    return {
        "timing": {
            "texts": len(texts),
            "p": round(p, 4),
            "cached_ms": round(statistics.median(times[True]) * 1e3, 2),
            "fresh_ms": round(statistics.median(times[False]) * 1e3, 2),
            "control_p": float(f"{control:.3g}"),
            "control_cached_ms": round(statistics.median(own[True]) * 1e3, 2),
            "control_fresh_ms": round(statistics.median(own[False]) * 1e3, 2),
        }
    }


def _text(rng: random.Random) -> str:
    """About 200 tokens, and like no other."""
    words = rng.sample(TOPICS, 8)
    body = rng.choices([*TOPICS, *COMMON], k=110)
    return " ".join(words) + ". " + " ".join(body) + "."


def rank_test(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p of Mann and Whitney's U, by its normal approximation."""
    joined = sorted([(value, True) for value in one] + [(value, False) for value in other])
    ranks = sum(place for place, (_, is_one) in enumerate(joined, 1) if is_one)
    n, m = len(one), len(other)
    u = ranks - n * (n + 1) / 2
    deviation = math.sqrt(n * m * (n + m + 1) / 12)
    z = (abs(u - n * m / 2) - 0.5) / deviation
    return min(1.0, math.erfc(max(0.0, z) / math.sqrt(2)))
