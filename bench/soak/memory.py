"""Does memory stay flat while knowledge bases are opened and closed, hour after hour?

    python bench/soak/memory.py --minutes 60

Starts `kvweave serve` with room for two open knowledge bases and twelve to ask: every request opens
one and closes another. Clients search, chat, upload and delete; every now and then a knowledge base
is deleted and made anew. Sampled once a second: resident memory, threads and file handles of the
server's process. Flat: the median of the last third is not above that of the middle third by more
than GROWTH allows, and neither is the slope of the last two thirds. Exits 1 otherwise.
"""

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import httpx
import psutil

from common.results import finish, result_header, save_run
from reliability.crash_world import CrashServer, CrashWorld
from reliability.kills import free_port
from reliability.notes import Version

KBS = 12
OPEN = 2
PAUSE_S = 0.05  # of a client between two requests
# of the middle third, as a share and outright: what the last third may have more
GROWTH = {"rss_mb": (1.05, 16.0), "threads": (1.0, 4.0), "handles": (1.10, 12.0)}
SLOPE_MB_PER_HOUR = 30.0  # of the last two thirds, where they are at least 20 minutes
MIN_SLOPE_S = 1200.0


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
                **{"kb": f"kb{kb}", "k": 3, "max_tokens": 4},
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


class Samples:
    """Of the server's process."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.taken: list[dict[str, float]] = []

    def take(self, at_s: float) -> None:
        self.taken.append(
            {
                "at_s": at_s,
                "rss_mb": self._process.memory_info().rss / 1e6,
                "threads": float(self._process.num_threads()),
                "handles": float(self._process.num_fds()),
            }
        )

    def thirds(self, name: str) -> list[float]:
        third = max(1, len(self.taken) // 3)
        parts = (self.taken[:third], self.taken[third : 2 * third], self.taken[2 * third :])
        return [round(statistics.median(s[name] for s in part), 1) for part in parts if part]

    def slope_per_hour(self, name: str) -> float | None:
        """Of the last two thirds; None: too short to say."""
        part = self.taken[len(self.taken) // 3 :]
        if len(part) < 3 or part[-1]["at_s"] - part[0]["at_s"] < MIN_SLOPE_S:
            return None
        slope, _ = statistics.linear_regression([s["at_s"] for s in part], [s[name] for s in part])
        return round(slope * 3600, 2)

    def wrong(self) -> list[str]:
        found = []
        for name, (share, outright) in GROWTH.items():
            _, middle, last = self.thirds(name)
            if last > max(middle * share, middle + outright):
                found.append(f"{name} grew from {middle} to {last}")
        slope = self.slope_per_hour("rss_mb")
        if slope is not None and slope > SLOPE_MB_PER_HOUR:
            found.append(f"memory grows by {slope} MB an hour")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="add the run to this result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        world = CrashWorld(Path(temporary) / "world", forks=False)
        server = CrashServer(world, free_port(), env={"KVWEAVE_SERVER_OPEN_KBS": str(OPEN)})
        try:
            if not server.wait_ready():
                raise SystemExit("the server is not ready in time")
            visitors = Visitors(server.url, args.seed)
            visitors.fill()
            began_s = time.monotonic()
            samples, until_s = Samples(server.pid), began_s + args.minutes * 60
            threads = [
                threading.Thread(target=visitors.visit, args=(n, until_s), daemon=True)
                for n in range(args.clients)
            ]
            for thread in threads:
                thread.start()
            told_s = began_s
            while any(thread.is_alive() for thread in threads):
                time.sleep(1)
                samples.take(time.monotonic() - began_s)
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
                   "model": "tiny", "seed": args.seed},
        "minutes": round(minutes, 1),
        "requests": dict(sorted(visitors.done.items())),
        "thirds": {name: samples.thirds(name) for name in GROWTH} if samples.taken else {},
        "rss_mb_per_hour": samples.slope_per_hour("rss_mb"),
        "wrong": wrong,
        "ok": not wrong,
    }  # fmt: skip


if __name__ == "__main__":
    main()
