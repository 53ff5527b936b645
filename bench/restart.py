"""What is lost when the device or the process of a server goes, and how soon does it answer again?

    python bench/restart.py --out bench/results/restart-cpu.json
    python bench/restart.py --device cuda --out bench/results/restart-h200.json

Clients ask without a pause, half of them in streams, about a few sets of documents, and never try
again by themselves. In the midst of that the device is lost (on a GPU a kernel asserts, elsewhere
every step of the engine fails) or, with --how kill, the server's process is killed with `kill -9`.
A row tells what became of the requests that were there, seconds until an answer that was asked for
behind the loss was complete, and how much of the prompts was exact KV before and right after.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from common.files import REPO
from common.results import finish, result_header

SETS, PER_SET = 6, 4  # of documents, and in each
START_S = 900.0
START_LEAST_S = 2.0  # what ends sooner was computed before the loss
HOOKED = "from reliability.lost_device import main; main()"


class Asked(NamedTuple):
    """What became of one request."""

    began_s: float
    ended_s: float
    how: str  # "answered", "ended by an error", "refused", "connection lost"
    number: int = 0  # of its set
    cached: int = 0  # tokens of the prompt that were exact KV
    total: int = 0
    words: str = ""  # of what refused it


def documents(number: int) -> list[str]:
    """Documents of one set: long enough to cost something, and like no other's."""
    words = random.Random(number)
    names = [f"node-{words.randrange(10_000)}" for _ in range(60)]
    threes = zip(names[::3], names[1::3], names[2::3], strict=True)
    lines = [f"{a} is drained before {b} and after {c}." for a, b, c in threes]
    return [" ".join([f"Part {part}.", *lines]) for part in range(PER_SET)]


def body(number: int, **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": "Which node is drained first?"}]
    chat = {"messages": said, "documents": documents(number), "reuse": "prefix"}
    return {**chat, "order": "as_found", "temperature": 0, "stop_loops": False, **more}


class Load:
    """Clients that ask on and on. `asked` grows until `stop`."""

    def __init__(self, url: str, clients: int, tokens: int) -> None:
        self.asked: list[Asked] = []
        self._url = f"{url}/v1/chat/completions"
        self._tokens = tokens
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(number,)) for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, client: int) -> None:
        chance = random.Random(client)
        while not self._over.is_set():
            began_s = time.monotonic()
            asked = self._ask(chance.randrange(SETS), began_s, stream=client % 2 == 0)
            self.asked.append(asked)
            if asked.how != "answered":
                time.sleep(0.2)

    def _ask(self, number: int, began_s: float, *, stream: bool) -> Asked:
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        asked = body(number, stream=stream, max_tokens=self._tokens, **usage)
        try:
            reply = httpx.post(self._url, json=asked, timeout=START_S)
        except httpx.TransportError:
            return Asked(began_s, time.monotonic(), "connection lost")
        ended_s = time.monotonic()
        if reply.status_code != 200:
            return Asked(began_s, ended_s, "refused", words=f"{reply.status_code} {reply.text}")
        text = reply.text
        if stream:
            *_, last, done = [line for line in text.splitlines() if line.startswith("data: ")]
            if done != "data: [DONE]":
                return Asked(began_s, ended_s, "ended by an error")
            text = last.removeprefix("data: ")
        found = json.loads(text)["usage"]
        cached = found["prompt_tokens_details"]["cached_tokens"]
        return Asked(began_s, ended_s, "answered", number, cached, found["prompt_tokens"])


@contextmanager
def serving(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, int]]:
    """The server's address, and its keeper's process."""
    command = [sys.executable, "-c", HOOKED, str(folder / "lost"), "serve", "--port"]
    command += [str(args.port), "--model", args.model, "--device", args.device]
    # where this process finds what it imports: packages may lie in a folder of their own
    paths = os.pathsep.join([str(REPO / "src"), str(REPO / "bench"), *sys.path[1:]])
    env = {**os.environ, "PYTHONPATH": paths, "KVWEAVE_CONFIG": os.devnull}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
    url = f"http://127.0.0.1:{args.port}"
    try:
        wait_until_ready(url, process, folder / "log")
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz", timeout=10).status_code == 200:
                return
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise SystemExit(f"not ready: {log.read_text()[-2000:]}")


def exact_share(url: str) -> float:
    """How much of the prompts was exact KV, each set asked once."""
    cached = total = 0
    for number in range(SETS):
        asked = body(number, max_tokens=1)
        reply = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=START_S)
        usage = reply.raise_for_status().json()["usage"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
        total += usage["prompt_tokens"]
    return round(cached / total, 3)


def first_share(asked: list[Asked], behind_s: float) -> float:
    """How much of the prompts was exact KV, the first answer about each set behind a moment."""
    first: dict[int, Asked] = {}
    for each in asked:
        if each.how == "answered" and each.ended_s > behind_s:
            first.setdefault(each.number, each)
    total = sum(each.total for each in first.values())
    return round(sum(each.cached for each in first.values()) / max(1, total), 3)


def lose(args: argparse.Namespace, folder: Path, keeper: int) -> None:
    """Lose the device, or the process."""
    if args.how == "kill":
        psutil.Process(keeper).children()[0].kill()
        return
    (folder / "lost").touch()
    deadline = time.monotonic() + 120
    while "starting again" not in (folder / "log").read_text():
        if time.monotonic() > deadline:
            raise SystemExit("nobody noticed that the device is lost")
        time.sleep(0.02)
    (folder / "lost").unlink()  # the next process has a sound one


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with serving(args, folder) as (url, keeper):
        exact_share(url)
        before = exact_share(url)
        time.sleep(args.idle_s)  # on a GPU, for exact KV to be copied to host memory
        load = Load(url, args.clients, args.tokens)
        time.sleep(args.load_s)
        lost_s = time.monotonic()
        lose(args, folder, keeper)
        deadline = lost_s + START_S
        while not (later := [a for a in load.asked if a.began_s > lost_s and a.how == "answered"]):
            if time.monotonic() > deadline:
                raise SystemExit(f"no answer: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)
        again_s = min(each.ended_s for each in later) - lost_s
        time.sleep(args.load_s)
        load.stop()
        said = [line for line in (folder / "log").read_text().splitlines() if "kvweave: " in line]
    there = [each for each in load.asked if each.began_s <= lost_s < each.ended_s]
    behind = [each for each in load.asked if each.began_s > lost_s]
    return {
        "how": args.how,
        "under_way": dict(Counter(each.how for each in there)),
        "asked_behind_it": dict(Counter(each.how for each in behind)),
        "seconds_until_answers": round(again_s, 2),
        "longest_wait_s": round(max(each.ended_s - each.began_s for each in (*there, *behind)), 2),
        "exact_share_before": before,
        "exact_share_right_after": first_share(load.asked, lost_s + START_LEAST_S),
        "refused": sorted({each.words for each in load.asked if each.words}),
        "said": [line for line in said if "again" in line or "is back" in line],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--how", choices=("device", "kill"), default="device")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="of an answer [%(default)s]")
    parser.add_argument("--load-s", type=float, default=10.0, help="before the loss [%(default)s]")
    parser.add_argument("--idle-s", type=float, default=5.0, help="before the load [%(default)s]")
    parser.add_argument("--port", type=int, default=8397)
    parser.add_argument("--out", type=Path, help="add the run to this result file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(args, Path(folder))
    print(json.dumps(row, indent=1))
    finish(__doc__, {**result_header("restart", args.device), "restart": row}, args.out)


if __name__ == "__main__":
    main()
