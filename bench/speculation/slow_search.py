"""What does speculative prefill give a user with default settings whose searches are long?

    python bench/speculation/slow_search.py --data DATA --out bench/results/slow_search-cpu.json
    python bench/speculation/slow_search.py --data DATA --passages 300 --questions 6     # a try

`kvweave serve` with nothing but a port and a folder of knowledge bases, asked over HTTP, streamed;
the time to the first token is the client's. The vectors lie on a server of their own that speaks
Qdrant's API (vector_server.py): real vectors, a real graph, and answers that are held as long as a
search over far more vectors takes, in proportion to what each walk compared. Two kvweave servers
over copies of one knowledge base get the same questions in turns, while the other one is frozen:

    default   the request as it is: speculation is `auto`
    off       with `"speculate": "off"`

The first `--learn` questions of each level are asked and not counted: there `auto` learns. Their
figures stand beside the others. `held` is the share of guesses that became the answer, `slower` the
share of requests whose first token came later than without by more than 5 %. Questions are of
Natural Questions over Wikipedia passages. Chunk KV is made before (kept in bench/cache): minutes
the first time. Time nothing while something else runs.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from common.files import CACHE, read_jsonl
from common.results import finish, result_header
from kvweave.corpus.knowledge_base import KnowledgeBase
from product_parts.asking import Reply, ask_chat
from product_parts.figures import percentile
from product_parts.knowledge import copy_of, prepare
from product_parts.servers import (
    RunningServer,
    ServerProcess,
    default_env,
    free_port,
    own_home,
    start_kvweave,
    taking_turns,
)

ARMS = ("default", "off")
LEARN = 20  # questions of each level that come before those that count
SETTLE_S = 12.0
MAX_TOKENS = 12
NAME = "wiki"
SLOWER = 1.05
READY_S = 30.0


class Pair(NamedTuple):
    """One question, on both servers."""

    default: Reply
    off: Reply


class Level(NamedTuple):
    """What is measured by itself."""

    search_ms: float  # a search by itself
    reuse: str
    address: str  # of the vector server


def read_world(data: Path, num_passages: int) -> tuple[list[dict[str, str]], list[str]]:
    """Passages, and questions that are answered from some of them first."""
    found = islice(read_jsonl(data / "wiki_kb" / "passages.jsonl.gz"), num_passages)
    passages = [{"id": p["pid"], "title": p["title"], "text": p["text"]} for p in found]
    titles = {passage["title"] for passage in passages}
    records = list(read_jsonl(data / "nq_oracle" / "nq_open_oracle.jsonl.gz"))
    records.sort(key=lambda r: not any(p["title"] in titles for p in r["passages"]))
    return passages, [record["question"] for record in records]


def start_vector_server(folder: Path, wire_ms: float) -> tuple[ServerProcess, str]:
    port = free_port()
    script = str(Path(__file__).with_name("vector_server.py"))
    command = [sys.executable, script, "--port", str(port), "--wire-ms", str(wire_ms)]
    process = ServerProcess("vectors", command, default_env(folder), folder / "vectors.log", folder)
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s:
        try:
            httpx.get(f"http://127.0.0.1:{port}/collections/none/exists")
            return process, f"127.0.0.1:{port}"
        except httpx.ConnectError:
            if not process.is_alive:
                break
            time.sleep(0.1)
    raise process.fail("did not start")


def put_vectors(folder: Path, url: str) -> None:
    """Move the vectors of a knowledge base onto a server."""
    with KnowledgeBase.open(folder, index=url) as kb, kb.writing():
        kb.publish()


def ask_pair(servers: Sequence[RunningServer], question: str, number: int, reuse: str) -> Pair:
    """On both servers, another one first each time."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "kb": NAME,
    }
    if reuse != "default":
        body["reuse"] = reuse
    replies: dict[str, Reply] = {}
    for arm in ARMS if number % 2 else ARMS[::-1]:
        more = {"speculate": "off"} if arm == "off" else {}
        with taking_turns(servers, ARMS.index(arm), SETTLE_S):
            replies[arm] = ask_chat(servers[ARMS.index(arm)].http, {**body, **more})
    return Pair(replies["default"], replies["off"])


def told(reply: Reply) -> Mapping[str, Any]:
    """What the server says of its guesses."""
    assert reply.explain is not None, "it was asked for"
    return reply.explain.get("speculation") or {}


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Of questions that both servers answered."""
    ours = [pair.default.ttft_ms for pair in pairs]
    theirs = [pair.off.ttft_ms for pair in pairs]
    said = [told(pair.default) for pair in pairs]
    guesses = sum(each.get("guesses", 0) for each in said)
    held = sum(each.get("right_stage") is not None for each in said)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(pairs), (2000, len(pairs)))
    gains = np.median(np.array(theirs)[drawn], axis=1) / np.median(np.array(ours)[drawn], axis=1)
    searched = [each["search_ms"] for each in said if "search_ms" in each]
    hidden = [each["hidden_ms"] for each in said if each.get("guesses")]
    return {
        "requests": len(pairs),
        "ttft_p50_ms": round(percentile(ours, 50), 1),
        "ttft_p95_ms": round(percentile(ours, 95), 1),
        "off_p50_ms": round(percentile(theirs, 50), 1),
        "off_p95_ms": round(percentile(theirs, 95), 1),
        "times_p50": round(percentile(theirs, 50) / percentile(ours, 50), 3),
        "times_p50_95": [round(float(np.percentile(gains, p)), 3) for p in (2.5, 97.5)],
        "times_p95": round(percentile(theirs, 95) / percentile(ours, 95), 3),
        "slower": round(
            statistics.mean(o > SLOWER * t for o, t in zip(ours, theirs, strict=True)), 3
        ),
        "staged": round(len(searched) / len(pairs), 3),
        "searched_ms": round(statistics.median(searched), 1) if searched else None,
        "guesses": guesses,
        "held": round(held / guesses, 3) if guesses else None,
        "hidden_ms": round(statistics.median(hidden), 1) if hidden else None,
        "wasted_tokens": sum(each.get("wasted_tokens", 0) for each in said),
        "same_answers": round(statistics.mean(p.default.text == p.off.text for p in pairs), 3),
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    names = ("off_p50_ms", "ttft_p50_ms", "times_p50", "off_p95_ms", "ttft_p95_ms", "slower",
             "guesses", "held", "hidden_ms", "same_answers")  # fmt: skip
    table = Table("search", "reuse", *names, title="First token, without and with", box=None)
    for row in rows:
        told_of = [str(row[name]) for name in names]
        table.add_row(f"{row['search_ms']:.0f} ms", row["reuse"], *told_of)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with wiki_kb, nq_oracle")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--passages", type=int, default=4000)
    parser.add_argument("--questions", type=int, default=40, help="of each level, that count")
    parser.add_argument("--learn", type=int, default=LEARN, help="questions that come before those")
    parser.add_argument("--search-ms", type=float, nargs="+", default=[100.0])
    parser.add_argument("--wire-ms", type=float, default=0.0, help="of each, there and back")
    parser.add_argument("--reuse", nargs="+", default=["default"], help="or: prefix, full, …")
    parser.add_argument("--cache", type=Path, default=CACHE, help="keeps chunk KV between runs")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    passages, questions = read_world(args.data, args.passages)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvweave-slow-search-") as temporary:
        folder = Path(temporary)
        home = own_home(folder)
        made = prepare(NAME, passages, args.model, args.cache, home)
        vectors, address = start_vector_server(folder, args.wire_ms)
        try:
            for level_ms in args.search_ms:
                for reuse in args.reuse:
                    level = Level(level_ms, reuse, address)
                    rows.append({**level._asdict(), **measure(args, made, home, level, questions)})
        finally:
            vectors.stop()
    show(rows)
    config = {
        name: getattr(args, name)
        for name in ("model", "passages", "questions", "learn", "wire_ms", "search_ms", "reuse")
    }
    first = rows[0]
    finish(
        __doc__,
        {
            **result_header("slow_search", "cpu" if args.device == "auto" else args.device),
            "config": config,
            "times_p50": first["times_p50"],
            "times_p95": first["times_p95"],
            "worst_p50": min(row["times_p50"] for row in rows),
            "held": first["held"],
            "rows": rows,
        },
        args.out,
    )


def measure(
    args: argparse.Namespace,
    made: Path,
    home: Path,
    level: Level,
    questions: Sequence[str],
) -> dict[str, Any]:
    """One level: new servers over new copies."""
    servers: list[RunningServer] = []
    with tempfile.TemporaryDirectory(dir=home.parent) as folder:
        try:
            for arm in ARMS:
                root = Path(folder) / arm
                root.mkdir()
                copy_of(made, root, NAME)
                put_vectors(root / NAME, f"qdrant://{level.address}")
                httpx.put(f"http://{level.address}/search_ms", json=level.search_ms, timeout=600)
                servers.append(start_kvweave(arm, args.model, root, home, args.device))
            pairs = []
            for number, question in enumerate(questions[: args.learn + args.questions]):
                pair = ask_pair(servers, question, number, level.reuse)
                pairs.append(pair)
                ttft = f"off {pair.off.ttft_ms:,.0f} ms, default {pair.default.ttft_ms:,.0f} ms"
                print(f"[{number}] {ttft} {dict(told(pair.default))}", flush=True)
            counted = [server.metrics() for server in servers]
        finally:
            for server in servers:
                server.close()
    total = "kvweave_staged_searches_total"
    return {
        **figures(pairs[args.learn :]),
        "learning": figures(pairs[: args.learn]),
        "staged_searches": [each.get(total) for each in counted],
    }


if __name__ == "__main__":
    main()
