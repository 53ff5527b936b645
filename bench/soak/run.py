"""Does the server hold? Many clients at once that stream, leave, upload, and send nonsense.

    python bench/soak/run.py --minutes 10 --clients 64

Starts `kvweave serve` as a process of its own, over a tiny random model unless --model says
otherwise, and lets clients do what clients do. At the end: no request is stuck, every reply was
well-formed, threads, file handles and memory have stopped growing, and no lease is held. Exits 1 if
any of it is not so. The last line is one JSON object.
"""

import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from common.files import REPO
from common.results import finish, result_header
from kvweave.paths import home
from soak.clients import Soak

STUCK_S = 120.0  # a request that takes longer is stuck
SAMPLE_S = 1.0
# The last third of the run against the middle one: what may be more, as a share and outright.
GROWTH = {"rss_mb": (1.10, 24.0), "threads": (1.0, 4.0), "handles": (1.10, 12.0)}


def make_model(folder: Path) -> str:
    sys.path.insert(0, str(REPO / "tests"))
    from worlds.tiny_models import make_chat_model_folder

    return str(make_chat_model_folder(folder, max_position_embeddings=4096))


def start(args: argparse.Namespace, folder: Path, log: Path) -> tuple[subprocess.Popen[str], str]:
    """The server's process and address, once it has greeted."""
    model = args.model or make_model(folder)
    command = [sys.executable, "-m", "kvweave", "serve", "--port", "0", "--model", model]
    command += ["--kb-root", str(folder / "kbs"), "--encoding", "filler:1", "--log-format", "json"]
    command += ["--max-body-mb", "0.2", "--max-upload-mb", "1", "--waiting", str(args.waiting)]
    own = folder / "home"  # a tiny model's machine profile must not stay behind
    own.mkdir()
    (own / "models").symlink_to(home() / "models")
    env = {**os.environ, "PYTHONPATH": str(REPO / "src"), "KVWEAVE_HOME": str(own)}
    env["KVWEAVE_SERVER_RESTARTS"] = "0"  # one process: its memory is watched
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env=env
    )
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return process, found[0]
    raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")


class Watch:
    """Samples of the server's process."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.samples: list[dict[str, float]] = []

    async def run(self) -> None:
        while True:
            self.samples.append(
                {
                    "rss_mb": self._process.memory_info().rss / 1e6,
                    "threads": self._process.num_threads(),
                    "handles": self._process.num_fds(),
                }
            )
            await asyncio.sleep(SAMPLE_S)

    def growth(self) -> dict[str, tuple[float, float]]:
        """Medians of the middle third and of the last one."""
        third = len(self.samples) // 3
        middle, last = self.samples[third : 2 * third], self.samples[2 * third :]
        return {
            name: (
                statistics.median(s[name] for s in middle),
                statistics.median(s[name] for s in last),
            )
            for name in GROWTH
        }


async def soak(args: argparse.Namespace, url: str, watch: Watch) -> Soak:
    limits = httpx.Limits(max_connections=args.clients + 8, max_keepalive_connections=args.clients)
    async with httpx.AsyncClient(base_url=url, timeout=STUCK_S, limits=limits) as http:
        world = Soak(http, url, args.seed, STUCK_S)
        await world.prepare()
        watching = asyncio.create_task(watch.run())
        until_s = time.monotonic() + args.minutes * 60
        await asyncio.gather(*(world.client(n, until_s) for n in range(args.clients)))
        watching.cancel()
        await world.settle()
        return world


def judge(world: Soak, watch: Watch, log: Path, code: int) -> list[str]:
    """What is wrong, in words."""
    wrong = list(world.faults)
    for name, (before, after) in watch.growth().items():
        share, outright = GROWTH[name]
        if after > max(before * share, before + outright):
            wrong.append(f"{name} grew from {before:.0f} to {after:.0f}")
    bad = ('"level": "error"', "Traceback")
    lines = log.read_text().splitlines()
    wrong += [f"log: {line[:300]}" for line in lines if any(word in line for word in bad)]
    if code != 0:
        wrong.append(f"the server ended with {code}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--waiting", type=int, default=32, help="places behind 64 that run")
    parser.add_argument("--model", help="a model of your own; a tiny random one if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="add the run to this result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        log = folder / "log"
        process, url = start(args, folder, log)
        try:
            watch = Watch(process.pid)
            world = asyncio.run(soak(args, url, watch))
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
        finally:
            process.kill()
        wrong = judge(world, watch, log, code)
    console = Console()
    table = Table("what", "done", "p50 ms", "max ms")
    for name, taken in sorted(world.taken_ms.items()):
        middle = f"{statistics.median(taken):.0f}"
        table.add_row(name, str(len(taken)), middle, f"{max(taken):.0f}")
    console.print(table)
    for name, (before, after) in watch.growth().items():
        console.print(f"{name}: {before:.0f} in the middle third, {after:.0f} in the last")
    for words in wrong[:20]:
        console.print(f"WRONG {words}", markup=False)
    result: dict[str, Any] = {
        **result_header("soak", "cpu"),
        "config": {"minutes": args.minutes, "clients": args.clients, "model": args.model or "tiny"},
        "requests": sum(len(taken) for taken in world.taken_ms.values()),
        "by_kind": {name: len(taken) for name, taken in sorted(world.taken_ms.items())},
        "by_status": dict(sorted(world.statuses.items())),
        "growth": {name: list(pair) for name, pair in watch.growth().items()},
        "end": world.end,
        "wrong": wrong[:20],
        "ok": not wrong,
    }
    finish(__doc__, result, args.out)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
