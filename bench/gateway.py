"""What does a gateway add to a request, and how much more do replicas find with it than in turns?

Real processes: `kvweave serve` twice with a tiny random model (as the tests make it) or --model,
and `kvweave gateway` in front of both.

    added_p50_ms, added_p99_ms   the same chat through the gateway and to one upstream directly, in
                                 turns, one client: the difference of the percentiles
    at_once                      the same with that many clients side by side
    hits                         tokens of prompts that upstreams did not compute, as they count
                                 them themselves: routing by content against round robin, chunks as
                                 they were found and free to move, each on servers that begin empty

The stream of the hits: --lists lists of passages, those that BM25 finds for questions of MMLU
(--data, minutes) or invented ones, asked for again and again by Zipf's law (--skew), each time with
another question behind them: what is popular comes back. Passages are cut to --passage-words words,
so that a tiny context holds them. A replica's tree holds --pool-tokens / 2.

Exits 1 if the gateway adds 5 ms or more at p99 with one client, or finds no more than round robin.

    python bench/gateway.py --out bench/results/gateway-cpu.json
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from common.files import REPO, read_jsonl
from common.results import cpu_device, finish, result_header
from common.word_lists import CORPUS, word_lists, zipf_lists

MOST_ADDED_MS = 5.0
WAYS = [
    ("round_robin", "as_found"),
    ("cache", "as_found"),
    ("round_robin", "free"),
    ("cache", "free"),
]


@contextmanager
def started(folder: Path, *command: object, **env: str) -> Iterator[str]:
    """A kvweave process that listens; its address."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = [sys.executable, "-m", "kvweave", *map(str, command), "--port", "0"]
    variables = {**os.environ, "PYTHONPATH": str(REPO / "src"), "KVWEAVE_CONFIG": os.devnull}
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            whole, stdout=subprocess.PIPE, stderr=log, text=True, env={**variables, **env}
        ) as process,
    ):
        try:
            assert process.stdout is not None
            found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stdout)
            address = next((each[0] for each in found if each), None)
            if address is None:
                raise SystemExit(f"it did not start: {(folder / 'log').read_text()[-2000:]}")
            yield address
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def fleet(args: argparse.Namespace, model: str, routing: str) -> Iterator[tuple[list[str], str]]:
    """Two upstreams that begin empty, and a gateway over them."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        pool = {"KVWEAVE_ENGINE_POOL_TOKENS": str(args.pool_tokens), "OMP_NUM_THREADS": "1"}

        def start(each: str) -> AbstractContextManager[str]:
            where = folder / each
            return started(where, "serve", "--model", model, "--kb-root", where, **pool)

        with ThreadPoolExecutor(2) as threads:
            upstreams = list(threads.map(stack.enter_context, map(start, "ab")))
        named = [part for url in upstreams for part in ("--upstream", url)]
        front = stack.enter_context(
            started(
                folder / "gateway",
                *("gateway", *named, "--tokenizer", model, "--kb-root", folder / "kbs"),
                *("--routing", routing),
                KVWEAVE_GATEWAY_MIRROR_TOKENS=str(args.pool_tokens // 2),
            )
        )
        yield upstreams, front


def chatting(url: str, stream: bool) -> Callable[[int], float]:
    """Seconds of one chat of one token with a connection that is kept."""
    client = httpx.Client(base_url=url, timeout=120)

    def chat(number: int) -> float:
        message = {"role": "user", "content": f"Tell me of number {number % 7}."}
        body = {"messages": [message], "max_tokens": 1, "temperature": 0, "stream": stream}
        began_s = time.perf_counter()
        client.post("/v1/chat/completions", json=body).raise_for_status()
        return time.perf_counter() - began_s

    return chat


def latency(direct: str, front: str, requests: int, *, stream: bool = False) -> dict[str, float]:
    """One client, in turns."""
    ask = {"direct": chatting(direct, stream), "gateway": chatting(front, stream)}
    taken: dict[str, list[float]] = {name: [] for name in ask}
    for number in range(-50, requests):
        for name, chat in ask.items():
            seconds = chat(number)
            if number >= 0:
                taken[name].append(seconds)
    return percentiles(taken)


def latency_at_once(direct: str, front: str, requests: int, clients: int) -> dict[str, float]:
    """Several clients side by side: first at one upstream, then at the gateway, again and again."""
    taken: dict[str, list[float]] = {"direct": [], "gateway": []}
    blocks = 4
    with ThreadPoolExecutor(clients) as pool:
        for block in range(-1, blocks):
            for name, url in (("direct", direct), ("gateway", front)):
                chats = [chatting(url, False) for _ in range(clients)]

                def some(place: int, chats: Any = chats) -> list[float]:
                    return [chats[place](n) for n in range(requests // blocks // clients)]

                found = [s for each in pool.map(some, range(clients)) for s in each]
                if block >= 0:
                    taken[name] += found
    return percentiles(taken)


def percentiles(taken: dict[str, list[float]]) -> dict[str, float]:
    at = {name: np.percentile(np.array(s) * 1e3, [50, 99]) for name, s in taken.items()}
    told = {f"{name}_p{p}_ms": round(float(at[name][i]), 2) for name in at for i, p in _PERCENT}
    for i, p in _PERCENT:
        told[f"added_p{p}_ms"] = round(float(at["gateway"][i] - at["direct"][i]), 2)
    return told


_PERCENT = ((0, 50), (1, 99))


def prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Bodies of chats over documents."""
    if args.data is None:
        lists, corpus = zipf_lists(args.lists * 2, args.k, 2_000)
        words = ["node", "pod", "drain", "cordon", "evict", "cluster", "volume", "secret"]
        texts = [
            " ".join(
                words[(place * 31 + at * at) % len(words)] + str(place)
                for at in range(args.passage_words)
            )
            for place in range(corpus)
        ]
    else:
        lists, _ = word_lists(args.data, "mmlu", args.k)
        texts = [p["text"] for p in read_jsonl(args.data / CORPUS)]
    draw = np.random.default_rng(0)
    popular = draw.permutation(len(lists))[: args.lists]
    weights = 1.0 / np.arange(1, len(popular) + 1) ** args.skew
    order = draw.choice(popular, args.questions, p=weights / weights.sum())
    return [
        {
            "messages": [{"role": "user", "content": f"What about {number}?"}],
            "documents": [
                " ".join(texts[place].split()[: args.passage_words]) for place in lists[at]
            ],
        }
        for number, at in enumerate(order.tolist())
    ]


def hits(
    args: argparse.Namespace, model: str, bodies: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    told = []
    for routing, order in WAYS:
        with fleet(args, model, routing) as (_, front), httpx.Client(timeout=120) as client:

            def ask(body: dict[str, Any], order: str = order) -> dict[str, int]:
                more = {"max_tokens": 1, "temperature": 0, "explain": True, "order": order}
                reply = client.post(f"{front}/v1/chat/completions", json={**body, **more})
                reply.raise_for_status()
                tokens: dict[str, int] = reply.json()["explain"]["tokens"]
                return tokens

            with ThreadPoolExecutor(args.clients) as pool:
                counted = list(pool.map(ask, bodies))
        later = counted[len(counted) // 4 :]  # the first ones find empty trees
        total = sum(sum(each.values()) for each in later)
        found = sum(each["exact"] + each["reused"] for each in later)
        told.append({"routing": routing, "order": order, "hit_rate": round(found / total, 4)})
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the data sets; else invented lists")
    parser.add_argument("--model", help="of the upstreams; else a tiny random one")
    parser.add_argument("--requests", type=int, default=1000, help="for the latency")
    parser.add_argument("--questions", type=int, default=1000, help="for the hits")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--lists", type=int, default=300, help="that questions are asked about")
    parser.add_argument("--skew", type=float, default=0.8, help="Zipf's exponent")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--passage-words", type=int, default=30)
    parser.add_argument("--pool-tokens", type=int, default=96_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    console = Console()
    sys.path.insert(0, str(REPO / "tests"))
    from worlds.tiny_models import make_chat_model_folder

    with tempfile.TemporaryDirectory() as name:
        model = args.model or str(make_chat_model_folder(Path(name), max_position_embeddings=2048))
        with fleet(args, model, "cache") as (upstreams, front):
            alone = latency(upstreams[0], front, args.requests)
            streamed = latency(upstreams[0], front, args.requests // 2, stream=True)
            together = latency_at_once(upstreams[0], front, args.requests, args.clients)
        found = hits(args, model, prompts(args))
    table = Table("routing", "order", "hit rate")
    for row in found:
        table.add_row(row["routing"], row["order"], f"{100 * row['hit_rate']:.1f} %")
    console.print(table)
    console.print(f"one client: {alone}\nstreamed: {streamed}\n{args.clients} clients: {together}")
    by_way = {(row["routing"], row["order"]): row["hit_rate"] for row in found}
    result = {
        **result_header("gateway", cpu_device()),
        "config": {
            "model": args.model or "tiny random",
            "questions": args.questions,
            "lists": args.lists,
            "skew": args.skew,
            "k": args.k,
            "passage_words": args.passage_words,
            "pool_tokens": args.pool_tokens,
            "clients": args.clients,
            "data": args.data is not None,
        },
        "added_p50_ms": alone["added_p50_ms"],
        "added_p99_ms": alone["added_p99_ms"],
        "alone": alone,
        "streamed": streamed,
        "at_once": together,
        "hits": found,
        "hits_over_round_robin": round(
            by_way["cache", "as_found"] / max(1e-9, by_way["round_robin", "as_found"]), 2
        ),
    }
    finish(__doc__, result, args.out)
    is_fast = alone["added_p99_ms"] < MOST_ADDED_MS
    if not is_fast or by_way["cache", "as_found"] <= by_way["round_robin", "as_found"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
