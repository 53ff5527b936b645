"""What do chats pay while a large knowledge base is ingested in the background?

A server of its own, default settings. A few passages are brought in, then it is asked one question
after another, each new: a plain chat and one from the knowledge base in turn. That is done while
nothing else happens, then while all other passages come in as upload jobs, part by part, and once
more when they are in. Figures are medians and p95 of the time to the first word and to the last,
over all answers of a phase; `ratio_p95` is the p95 beside the ingest over the p95 before it (aim:
1.3 for the chat). `memory` is the server's, resident: before, the highest while the passages came,
at the end.

    python bench/background_ingest.py --data ../shared/data \
        --out bench/results/background_ingest-cpu.json

Without a pause the server is asked all the time, and the ingest has the share of the cores that
answers leave it; `--pause 5` lets people read. A quick trial: `--passages 600 --first 100
--asked 6`. Chunk KV is not waited for; `kv` says how far it was at the end.
"""

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from common.files import REPO, read_jsonl
from common.results import cpu_device, finish, result_header
from kvweave.paths import home

KB = "wiki"
KINDS = ("chat", "kb")
PHASES = ("before", "beside", "after")
LOOK_S = 0.5  # between two looks at a job


class Timed(NamedTuple):
    """One answer."""

    kind: str
    first_s: float  # to the first word
    total_s: float


class Client:
    """Talks to the server and knows which questions it has asked."""

    def __init__(self, url: str, titles: Sequence[str], max_tokens: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=1200)
        self._titles = itertools.cycle(titles)
        self._max_tokens = max_tokens
        self._asked = 0

    def ask(self, kind: str) -> Timed:
        """A question that was never asked in these words."""
        self._asked += 1
        words = f"({self._asked}) Tell me what you know about {next(self._titles)}."
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": words}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "stop_loops": False,
            "stream": True,
        }
        if kind == "kb":
            body["kb"] = KB
        began_s = time.perf_counter()
        first_s = None
        with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                event = line.removeprefix("data: ")
                if event == line or event == "[DONE]":
                    continue
                told = json.loads(event)
                assert "error" not in told, told
                said = [c["delta"].get("content") for c in told["choices"]]
                if first_s is None and any(said):
                    first_s = time.perf_counter() - began_s
        total_s = time.perf_counter() - began_s
        return Timed(kind, total_s if first_s is None else first_s, total_s)

    def upload(self, name: str, lines: Sequence[str]) -> str:
        """Begin a job; its id."""
        file = ("\n".join(lines)).encode()
        sent = self._http.post(f"/v1/kb/{KB}/jobs", files={"file": (name, file)})
        assert sent.status_code == 202, sent.text
        return str(sent.json()["id"])

    def finish(self, job_id: str) -> dict[str, Any]:
        """Wait for a job; its report."""
        while True:
            job = self._http.get(f"/v1/kb/{KB}/jobs/{job_id}").json()
            if job["state"] in ("done", "failed", "cancelled"):
                assert job["state"] == "done", job
                return dict(job["report"])
            time.sleep(LOOK_S)

    def status(self) -> dict[str, Any]:
        return dict(self._http.get(f"/v1/kb/{KB}").json())

    def wait_until_ready(self, patience_s: float) -> None:
        give_up_s = time.monotonic() + patience_s
        while time.monotonic() < give_up_s:
            try:
                if self._http.get("/readyz").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise SystemExit("the server was not ready in time")


class Ingest:
    """Brings passages in, part by part, on a thread of its own."""

    def __init__(self, client: Client, lines: Sequence[str], part: int) -> None:
        self.seconds = 0.0
        self._client = client
        self._parts = [lines[at : at + part] for at in range(0, len(lines), part)]
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_over(self) -> bool:
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _run(self) -> None:
        began_s = time.perf_counter()
        try:
            for number, lines in enumerate(self._parts):
                self._client.finish(self._client.upload(f"part-{number:04}.jsonl", lines))
                spent_s = time.perf_counter() - began_s
                print(f"part {number + 1} of {len(self._parts)}, {spent_s:,.0f} s", flush=True)
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - began_s


def main() -> None:
    args = parse_args()
    records = read_jsonl(args.data / "wiki_kb" / "passages.jsonl.gz")
    passages = list(itertools.islice(records, args.passages))
    lines = [json.dumps({"title": p["title"], "text": p["text"]}) for p in passages]
    titles = list(dict.fromkeys(str(p["title"]) for p in passages[: args.first]))
    timed: dict[str, list[Timed]] = {}
    with serving(args) as (url, pid):
        asking = Client(url, titles, args.max_tokens)
        uploading = Client(url, titles, args.max_tokens)  # a connection of its own
        asking.wait_until_ready(args.patience)
        asking.finish(asking.upload("first.jsonl", lines[: args.first]))
        for kind in KINDS:
            asking.ask(kind)  # warm up
        timed["before"] = [asking.ask(kind) for _ in range(args.asked) for kind in KINDS]
        memory = {"before_bytes": resident(pid)}
        ingest = Ingest(uploading, lines[args.first :], args.part)
        ingest.start()
        timed["beside"], highest = [], 0
        while not ingest.is_over:
            timed["beside"] += [asking.ask(kind) for kind in KINDS]
            highest = max(highest, resident(pid))
            time.sleep(args.pause)
        memory["highest_bytes"] = highest
        timed["after"] = [asking.ask(kind) for _ in range(args.asked) for kind in KINDS]
        memory["after_bytes"] = resident(pid)
        status = asking.status()
    figures = {phase: figures_of(timed[phase]) for phase in PHASES}
    ratios = {
        kind: round(figures["beside"][kind]["total_s_p95"] / of["total_s_p95"], 3)
        for kind, of in figures["before"].items()
    }
    found = {
        "passages": len(lines),
        "chunks": status["chunks"],
        "ingest_s": round(ingest.seconds, 1),
        "passages_per_s": round((len(lines) - args.first) / max(ingest.seconds, 1e-9), 1),
        **figures,
        "ratio_p95": ratios,
        "memory": memory,
        "kv": status["kv"],
    }
    show(found)
    config = {name: str(value) for name, value in vars(args).items() if name not in ("out", "data")}
    header = {**result_header("background_ingest", "cpu"), "device": cpu_device()}
    finish(__doc__, {**header, "config": config, **found}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with wiki_kb")
    parser.add_argument("--passages", type=int, default=35_745, help="of them, in all")
    parser.add_argument("--first", type=int, default=500, help="that are there from the start")
    parser.add_argument("--part", type=int, default=1000, help="passages in one job")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--asked", type=int, default=20, help="questions of each kind, when idle")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two rounds")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to be ready in")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args()


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """`kvweave serve` over an empty folder; its address and process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="background-ingest-") as folder:
        own = Path(folder) / "home"
        own.mkdir()
        (own / "models").symlink_to(home() / "models")
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVWEAVE_")}
        env |= {"KVWEAVE_HOME": str(own), "PYTHONPATH": str(REPO / "src")}
        env["KVWEAVE_SERVER_RESTARTS"] = "0"  # one process: its memory is watched
        command = [sys.executable, "-m", "kvweave", "serve", "--port", str(port)]
        command += ["--model", args.model, "--kb-root", str(Path(folder) / "kbs")]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, cwd=folder)
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise SystemExit("this machine does not say how much memory a process has")


def figures_of(timed: Sequence[Timed]) -> dict[str, dict[str, float]]:
    """By kind of question."""
    return {
        kind: {
            "answers": len(some),
            **{
                f"{name}_p{percent}": round(
                    percentile([getattr(t, name) for t in some], percent), 3
                )
                for name in ("first_s", "total_s")
                for percent in (50, 95)
            },
        }
        for kind in KINDS
        if (some := [each for each in timed if each.kind == kind])
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """Never above the highest."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def show(found: dict[str, Any]) -> None:
    columns = ("answers", "first_s_p50", "first_s_p95", "total_s_p50", "total_s_p95")
    table = Table("phase", "kind", *columns)
    for phase in PHASES:
        for kind, of in found[phase].items():
            table.add_row(phase, kind, *(f"{of[column]:g}" for column in columns))
    console = Console()
    console.print(table)
    memory = {name: f"{size / 1e6:,.0f} MB" for name, size in found["memory"].items()}
    console.print(
        f"{found['passages']:,} passages, {found['passages_per_s']:g} a second; p95 beside over "
        f"before: {found['ratio_p95']}; memory {memory}"
    )


if __name__ == "__main__":
    main()
