"""Does keeping answers for the web page cost time to the first token when nobody looks?

One model and one knowledge base (the packaged sample), served twice in this process: by a server
that keeps the details of its last answers, and by one that keeps none. Both are asked the same
questions over HTTP, streamed, in turns, and the one that goes first changes with every question.
Measured is what a client sees: from sending the request to the first word. On a machine that others
use too, `--clock cpu` counts what the process computed meanwhile instead of what the clock on the
wall says.

    python bench/ui_cost.py --out bench/results/ui_cost-cpu.json

`added_ms` is the median of the differences between the two askings of a question, kept less not
kept; `added_share` the same of the time to the first token. `trace_us` is what a fused pass spends
on noting the times of its layers, which both do: taken by itself. `told_ms` is what somebody waits
who does ask for the details of one answer.
"""

import argparse
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from rich.console import Console
from rich.table import Table

from common.results import finish, result_header
from kvweave.app.libraries.libraries import Libraries, LibrariesConfig
from kvweave.app.libraries.sample import sample_documents
from kvweave.app.weave import Weave
from kvweave.demo import read_questions
from kvweave.fuse.record import LayerTimes
from kvweave.serve.routes.context import PageConfig
from kvweave.serve.server import Server, ServerLifecycle

KB = "demo"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
MODES = {"kept": PageConfig(), "not kept": PageConfig(kept_answers=0)}


@contextmanager
def served(weave: Weave, libraries: Libraries, page: PageConfig) -> Iterator[str]:
    """A server on a free port of this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(
        weave, libraries=libraries, page=page, lifecycle=ServerLifecycle(patience_s=1.0)
    )
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        thread.join()


def first_word_s(client: httpx.Client, url: str, question: str, args: argparse.Namespace) -> float:
    """Seconds to the first word of an answer, whose end is waited for too."""
    now = CLOCKS[args.clock]
    body = {
        "messages": [{"role": "user", "content": question}],
        "kb": KB,
        "k": args.k,
        "reuse": {"strategy": args.strategy, "ratio": args.ratio},
        "stream": True,
        "temperature": 0,
        "max_tokens": 2,
    }
    first_s: float | None = None
    started_s = now()
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if first_s is None and '"content":"' in line and '"content":""' not in line:
                first_s = now() - started_s
    assert first_s is not None, "an answer without a word"
    return first_s


def told_ms(client: httpx.Client, url: str) -> float:
    """What the details of the last answer take."""
    name = client.get(f"{url}/v1/answers").json()["answers"][0]["id"]
    started_s = time.perf_counter()
    assert client.get(f"{url}/v1/answers/{name}").status_code == 200
    return (time.perf_counter() - started_s) * 1e3


def trace_us(num_layers: int, repeats: int = 2000) -> float:
    """What noting the times of so many layers takes."""
    started_s = time.perf_counter()
    for _ in range(repeats):
        times = [
            LayerTimes(time.perf_counter(), time.perf_counter(), time.perf_counter())
            for _ in range(num_layers)
        ]
        tuple(times)
    return (time.perf_counter() - started_s) / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--strategy", default="weave")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--rounds", type=int, default=3, help="over all questions of the sample")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    questions = [question.question for question in read_questions()]
    taken: dict[str, list[float]] = {name: [] for name in MODES}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        weave = stack.enter_context(Weave.open(model=args.model))
        libraries = Libraries(weave, LibrariesConfig(root=Path(folder)))
        stack.callback(libraries.close)
        libraries.ingest("", KB, sample_documents(), chunk_kv=True)
        urls = {n: stack.enter_context(served(weave, libraries, p)) for n, p in MODES.items()}
        client = stack.enter_context(httpx.Client(timeout=600))
        for url in urls.values():  # the first answer opens and measures what later ones find
            for question in questions[:2]:
                first_word_s(client, url, question, args)
        rng = random.Random(0)
        for turn in range(args.rounds):
            for place, question in enumerate(rng.sample(questions, len(questions))):
                order = list(MODES) if (turn + place) % 2 else list(reversed(MODES))
                for name in order:
                    taken[name].append(first_word_s(client, urls[name], question, args))
        told = told_ms(client, urls["kept"])
        num_layers = weave.runtime.decoder.spec.num_layers

    added = [(a - b) * 1e3 for a, b in zip(taken["kept"], taken["not kept"], strict=True)]
    medians = {name: statistics.median(values) * 1e3 for name, values in taken.items()}
    table = Table("", "first word, median ms", "p95 ms")
    for name, values in taken.items():
        p95 = statistics.quantiles(values, n=20, method="inclusive")[-1] * 1e3
        table.add_row(name, f"{medians[name]:.1f}", f"{p95:.1f}")
    Console().print(table)
    middle = statistics.median(added)
    spread = statistics.quantiles(added, n=4, method="inclusive")
    result = {
        **result_header("ui_cost", "cpu"),
        "model": args.model,
        "strategy": args.strategy,
        "ratio": args.ratio,
        "clock": args.clock,
        "askings": len(added),
        "first_word_ms": {name: round(value, 2) for name, value in medians.items()},
        "added_ms": round(middle, 3),
        "added_quartiles_ms": [round(spread[0], 3), round(spread[-1], 3)],
        "added_share": round(middle / medians["not kept"], 5),
        "trace_us": round(trace_us(num_layers), 1),
        "told_ms": round(told, 1),
    }
    finish(__doc__, result, args.out)


if __name__ == "__main__":
    main()
