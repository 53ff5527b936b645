"""Does memory stay flat while knowledge bases are opened and closed, hour after hour?

    python bench/soak/memory.py --minutes 60

Starts `kvweave serve` with room for two open knowledge bases and twelve to ask: nearly every
request opens one and closes another. Clients search, chat, upload and delete; every now and then a
knowledge base is deleted and made anew. Sampled once a second: resident memory, threads and file
handles of the server's process. Exits 1 if something grows.

Threads and handles: the median of the last third is not above that of the middle third by more than
GROWTH allows. Memory cannot be judged so, nor by its slope in time. It swings by tens of MB with
what is open at a moment, and it grows towards bounds for a good while: pages of the KV pool are
taken as the knowledge tree fills it, and each arena of the C library (eight per core) grows to the
largest work that a thread of it has met. A leak is neither: every opening adds to it, for ever. So
what is judged is the floor, which nine of ten samples exceed, in WINDOWS parts of the run, and how
it moves per opening in the second half: the median of the slopes between any two of its windows. A
warm-up has slowed down by then (the KV pool is set so small here that it is full), a leak has not.
More than LEAK_KB per opening is one: a closed knowledge base that stays is many times that.
"""

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import httpx
import psutil

from common.results import finish, result_header, save_run
from reliability.crash_world import CrashServer, CrashWorld
from reliability.fault_server import parse_metrics
from reliability.kills import free_port
from reliability.notes import Version

OPENED = "kvweave_kb_opened_total"
KBS = 12
OPEN = 2
PAUSE_S = 0.05  # of a client between two requests
POOL_TOKENS = 8192  # of the KV pool: full within a few hundred chats
# of the middle third, as a share and outright: what the last third may have more
GROWTH = {"threads": (1.0, 4.0), "handles": (1.10, 12.0)}
WINDOWS = 12  # of which the last half is judged
FLOOR = 0.1  # of the samples of a window lie below its floor
LEAK_KB = 4.0  # per opening
MIN_OPENINGS = 1000  # in the half that is judged: fewer say nothing
COUNT_S = 10.0  # between two looks at how many were opened


class Visitors:
    """Clients that go from one knowledge base to the next."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._seed = seed
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def fill(self) -> None:
        with httpx.Client(base_url=self._url, timeout=120) as http:
            for number in range(KBS):
                for key in range(4):
                    self._upload(http, number, key, random.Random(key))

    def visit(self, number: int, until_s: float) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        with httpx.Client(base_url=self._url, timeout=120) as http:
            while time.monotonic() < until_s:
                try:
                    self._act(http, rng)
                    time.sleep(PAUSE_S)
                except httpx.HTTPError as error:
                    self.wrong.append(f"{type(error).__name__}: {error}")
                    time.sleep(1)

    def _act(self, http: httpx.Client, rng: random.Random) -> None:
        kb, kind = rng.randrange(KBS), rng.random()
        if kind < 0.45:
            body = {"query": "how do I drain a node?", "k": 3}
            self._check(http.post(f"/v1/kb/kb{kb}/search", json=body), "search")
        elif kind < 0.75:
            body = {
                "messages": [{"role": "user", "content": "how do I drain a node?"}],
                "kb": f"kb{kb}",
                "k": 3,
                "max_tokens": 4,
                "reuse": rng.choice(["weave", "reuse", "full", "auto"]),
            }
            self._check(http.post("/v1/chat/completions", json=body), "chat")
        elif kind < 0.97:
            self._upload(http, kb, rng.randrange(4), rng)
        else:
            self._check(http.delete(f"/v1/kb/kb{kb}"), "delete")

    def _upload(self, http: httpx.Client, kb: int, key: int, rng: random.Random) -> None:
        version = Version(key, rng.randrange(10**6))
        body = {"title": version.title, "text": version.text, "key": str(key)}
        self._check(http.post(f"/v1/kb/kb{kb}/documents", json=body), "upload")

    def _check(self, reply: httpx.Response, what: str) -> None:
        """One that was deleted just now is a 404; one in use is asked for again."""
        self.done[f"{what} {reply.status_code}"] += 1
        if reply.status_code not in (200, 404, 409, 429, 503):
            self.wrong.append(f"{what}: {reply.status_code} {reply.text[:200]}")


class OpeningCounter:
    """How many knowledge bases the server has opened so far, as of a few seconds ago."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._counted = 0.0
        self._next_s = 0.0

    def count(self) -> float:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + COUNT_S
            found = parse_metrics(httpx.get(f"{self._url}/metrics", timeout=60).text, [OPENED])
            self._counted = found.get(OPENED, self._counted)
        return self._counted


class Floor(NamedTuple):
    """What memory came down to in a window of the run."""

    openings: float  # by the middle of it
    rss_mb: float


class Samples:
    """Of the server's process."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.taken: list[dict[str, float]] = []

    def take(self, openings: float) -> None:
        self.taken.append(
            {
                "openings": openings,
                "rss_mb": self._process.memory_info().rss / 1e6,
                "threads": float(self._process.num_threads()),
                "handles": float(self._process.num_fds()),
            }
        )

    def thirds(self, name: str) -> list[float]:
        third = max(1, len(self.taken) // 3)
        parts = (self.taken[:third], self.taken[third : 2 * third], self.taken[2 * third :])
        return [round(statistics.median(s[name] for s in part), 1) for part in parts if part]

    def floors(self) -> list[Floor]:
        """Of each window, in the order of time."""
        size = max(1, len(self.taken) // WINDOWS)
        windows = [self.taken[n * size : (n + 1) * size] for n in range(WINDOWS)]
        return [
            Floor(
                statistics.fmean(s["openings"] for s in window),
                sorted(s["rss_mb"] for s in window)[int(FLOOR * len(window))],
            )
            for window in windows
            if window
        ]

    def kb_per_opening(self) -> float | None:
        """That the floor rises by in the second half; None: too little was opened to say."""
        floors = self.floors()
        half = floors[len(floors) // 2 :]
        if len(half) < 3 or half[-1].openings - half[0].openings < MIN_OPENINGS:
            return None
        return round(1000 * median_slope(half), 2)

    def wrong(self) -> list[str]:
        found = []
        for name, (share, outright) in GROWTH.items():
            _, middle, last = self.thirds(name)
            if last > max(middle * share, middle + outright):
                found.append(f"{name} grew from {middle} to {last}")
        leak = self.kb_per_opening()
        if leak is not None and leak > LEAK_KB:
            found.append(f"every opening of a knowledge base leaves {leak} kB behind")
        return found


def median_slope(points: Sequence[Floor]) -> float:
    """Between any two of them (Theil and Sen): a window that is an exception does not move it."""
    return statistics.median(
        (b.rss_mb - a.rss_mb) / (b.openings - a.openings)
        for a, b in combinations(points, 2)
        if b.openings > a.openings
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="add the run to this result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        world = CrashWorld(Path(temporary) / "world", forks=False)
        env = {"KVWEAVE_SERVER_OPEN_KBS": str(OPEN), "KVWEAVE_ENGINE_POOL_TOKENS": str(POOL_TOKENS)}
        server = CrashServer(world, free_port(), env=env)
        try:
            if not server.wait_ready():
                raise SystemExit("the server is not ready in time")
            visitors = Visitors(server.url, args.seed)
            visitors.fill()
            began_s = time.monotonic()
            samples, until_s = Samples(server.pid), began_s + args.minutes * 60
            openings = OpeningCounter(server.url)
            threads = [
                threading.Thread(target=visitors.visit, args=(n, until_s), daemon=True)
                for n in range(args.clients)
            ]
            for thread in threads:
                thread.start()
            told_s = began_s
            while any(thread.is_alive() for thread in threads):
                time.sleep(1)
                samples.take(openings.count())
                if time.monotonic() - told_s > 60:
                    told_s = time.monotonic()
                    result = report(args, visitors, samples, (told_s - began_s) / 60)
                    print(f"{result['minutes']} min: {result['thirds']}", flush=True)
                    if args.out is not None:  # a run that is cut short has what it has
                        save_run(__doc__, result, args.out)
            minutes = (time.monotonic() - began_s) / 60
        finally:
            server.close()
            world.close()
    result = report(args, visitors, samples, minutes)
    for words in result["wrong"]:
        print(f"WRONG {words}")
    finish(__doc__, result, args.out)
    sys.exit(0 if result["ok"] else 1)


def report(
    args: argparse.Namespace, visitors: Visitors, samples: Samples, minutes: float
) -> dict[str, Any]:
    wrong = [*visitors.wrong[:10], *(samples.wrong() if len(samples.taken) >= 30 else [])]
    return {
        **result_header("memory", "cpu"),
        "config": {"minutes": args.minutes, "clients": args.clients, "kbs": KBS, "open": OPEN,
                   "pool_tokens": POOL_TOKENS, "model": "tiny", "seed": args.seed},
        "minutes": round(minutes, 1),
        "requests": dict(sorted(visitors.done.items())),
        "thirds": {n: samples.thirds(n) for n in ("rss_mb", *GROWTH)} if samples.taken else {},
        "floors": [[round(f.openings), round(f.rss_mb, 1)] for f in samples.floors()],
        "kb_per_opening": samples.kb_per_opening(),
        "wrong": wrong,
        "ok": not wrong,
    }  # fmt: skip


if __name__ == "__main__":
    main()
