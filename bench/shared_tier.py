"""Does a second server that shares a Valkey tier answer without encoding anything, and how soon?

Two `kvweave serve` processes with default settings, each with a folder of its own and nothing in
common but one Valkey server. Documents (the pages under docs/, or --documents) are uploaded to A,
which computes their chunk KV. Then B starts and gets the same documents; all its questions go
through HTTP with default settings.

    first_ms        from B's first fused question to its first token: search, plan, load from
                    Valkey, fuse. Questions that are not fused by default (`before` says why) or
                    are close calls and end up exact come before it
    later_ms        the median of the questions behind it, by then partly from B's host memory
    full_ms         the median of the same questions with reuse "full", in turns with the above
    encoded_chunks  chunk KV that B has computed up to its first fused answer: must be 0
    encoded_later   and from then on: a chunk that stands in front for the first time has a second
                    form, behind nothing, which A has not stored if it never stood in front there
    tiers           where the chunks of B's first fused answer came from

Exits 1 if B encoded something for it or it did not come from the shared tier. The valkey process is
found as the tests find it.

With --fleet a gateway stands in front of A and B, which begin empty, and has the documents. Two
clients ask it two of the questions at once, in all pairs, --pause seconds after each answer: so
each passage comes back in other company. Nothing is set but the address of the server:

    answers             of each replica
    fused               of these, how many reused stored KV
    encoded             chunk KV that each replica has computed
    loaded_bytes        that each replica has loaded from Valkey
    objects             chunk KV there

Then A goes away, and B is asked what A had answered, one question after the other:

    later_answers, later_fused, later_loaded_bytes, later_whys   of these; why others reused nothing
    state               what the gateway says of its chunk KV
    left                chunk KV on the server after all documents are deleted

Exits 1 if B then loaded nothing from Valkey, or something is left.

    python bench/shared_tier.py --out bench/results/shared_tier-cpu.json
    python bench/shared_tier.py --fleet --pages 4 --questions 6 \\
        --out bench/results/shared_tier_fleet-cpu.json
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from common.files import REPO
from common.results import finish, result_header

FLEET_QUESTION = "Do replicas behind a gateway share chunk KV by default?"
QUESTIONS = [
    "How does kvweave decide which chunk KV leaves a full tier?",
    "What happens when a byte of a stored file has changed?",
    "How are keys and values grouped when they are written as int8?",
    "Which settings may stand in a kvweave.toml, and which of several places wins?",
    "How is the knowledge base searched, and what is an index?",
    "What does the planner weigh before it answers a question?",
    "How does calibration find the ratio that may be used?",
    "What is computed while the search for chunks is still running?",
]


def serving(folder: Path, model: str, redis_url: str) -> AbstractContextManager[httpx.Client]:
    """A server of its own folder, and a client for it."""
    return started(folder, "serve", "--model", model, KVWEAVE_STORE_REDIS_URL=redis_url)


@contextmanager
def started(folder: Path, *arguments: str, **variables: str) -> Iterator[httpx.Client]:
    """A kvweave process of its own folder that listens, and a client for it."""
    folder.mkdir()
    command = [sys.executable, "-m", "kvweave", *arguments, "--port", "0"]
    command += ["--kb-root", str(folder / "kbs")]
    env = {**os.environ, "PYTHONPATH": str(REPO / "src"), **variables}
    log = folder / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env) as own,
    ):
        try:
            assert own.stdout is not None
            found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in own.stdout)
            address = next((each[0] for each in found if each), None)
            if address is None:
                raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
            with httpx.Client(base_url=address, timeout=1800) as client:
                yield client
        finally:
            own.terminate()
            own.wait(60)


def upload(client: httpx.Client, pages: list[Path], wait_for_kv: bool = True) -> float:
    """Seconds until all documents are in, chunk KV and all if that is waited for."""
    began_s = time.perf_counter()
    path = "/v1/kb/docs/documents" + ("?wait_for_kv=true" if wait_for_kv else "")
    for page in pages:
        body = {"title": page.stem, "text": page.read_text(), "key": page.name}
        client.post(path, json=body).raise_for_status()
    return time.perf_counter() - began_s


def ask(client: httpx.Client, question: str, **options: Any) -> tuple[float, dict[str, Any]]:
    """Milliseconds until the first token, which is all that is asked for; what was done."""
    body = {"messages": [{"role": "user", "content": question}], "kb": "docs", **options}
    began_s = time.perf_counter()
    reply = client.post(
        "/v1/chat/completions", json={**body, "max_tokens": 1, "temperature": 0, "explain": True}
    )
    taken_ms = (time.perf_counter() - began_s) * 1e3
    reply.raise_for_status()
    explain: dict[str, Any] = reply.json()["explain"]
    return taken_ms, explain


def counter(client: httpx.Client, name: str, label: str = "") -> float:
    """The sum of a counter over all its labels, or over those with one; 0 where nothing was
    counted."""
    lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if re.match(rf"kvweave_{name}(\{{|\s)", line)]
    found = [line for line in found if label in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def measure(args: argparse.Namespace, pages: list[Path], folder: Path) -> dict[str, Any]:
    sys.path.insert(0, str(REPO / "tests"))
    from worlds.servers import running_redis

    with ExitStack() as stack:
        port = stack.enter_context(running_redis(folder))
        url = f"redis://127.0.0.1:{port}/0"
        with serving(folder / "a", args.model, url) as first:
            ingest_a_s = upload(first, pages)
            encoded_a = counter(first, "kv_chunks_encoded_total")
        second = stack.enter_context(serving(folder / "b", args.model, url))
        ingest_b_s = upload(second, pages)
        before, fused_ms, full_ms = [], [], []
        questions = iter(QUESTIONS[: args.questions])
        for question in questions:
            first_ms, explain = ask(second, question)
            if explain["tokens"]["reused"]:
                break
            before.append(explain["why"])
        else:
            raise SystemExit(f"none of the questions was fused: {before}")
        encoded = int(counter(second, "kv_chunks_encoded_total"))
        for question in questions:
            fused_ms.append(ask(second, question)[0])
            full_ms.append(ask(second, question, reuse="full")[0])
        tiers = sorted({chunk["tier"] for chunk in explain["chunks"] if chunk["tier"]})
        return {
            "documents": len(pages),
            "encoded_by_a": int(encoded_a),
            "encoded_chunks": encoded,
            "encoded_later": int(counter(second, "kv_chunks_encoded_total")) - encoded,
            "ingest_a_s": round(ingest_a_s, 2),
            "ingest_b_s": round(ingest_b_s, 2),
            "strategy": explain["strategy"],
            "before": before,
            "tokens": explain["tokens"],
            "tiers": tiers,
            "loaded_bytes": explain["loaded_bytes"],
            "first_ms": round(first_ms, 1),
            "later_ms": round(statistics.median(fused_ms), 1),
            "full_ms": round(statistics.median(full_ms), 1),
            "first_speedup": round(statistics.median(full_ms) / first_ms, 2),
        }


def measure_fleet(args: argparse.Namespace, pages: list[Path], folder: Path) -> dict[str, Any]:
    sys.path.insert(0, str(REPO / "tests"))
    import redis

    from worlds.servers import running_redis

    with ExitStack() as stack, ExitStack() as of_a:
        url = f"redis://127.0.0.1:{stack.enter_context(running_redis(folder))}/0"
        valkey = stack.enter_context(redis.Redis.from_url(url))
        second = stack.enter_context(serving(folder / "b", args.model, url))
        first = of_a.enter_context(serving(folder / "a", args.model, url))
        replicas = [first, second]
        named = [part for each in replicas for part in ("--upstream", str(each.base_url))]
        front = stack.enter_context(
            started(folder / "gateway", "gateway", *named, "--tokenizer", args.model)
        )
        upload(front, pages, wait_for_kv=False)
        pairs = [" ".join(pair) for pair in combinations(QUESTIONS[: args.questions], 2)]

        def answer(question: str) -> dict[str, Any]:
            done: dict[str, Any] = ask(front, question)[1]["upstream"]
            time.sleep(args.pause)
            return done

        with ThreadPoolExecutor(2) as clients:
            done = list(clients.map(answer, pairs))
        of = [[d for d in done if d["upstream"] in str(each.base_url)] for each in replicas]
        measured = {
            "documents": len(pages),
            "answers": [len(each) for each in of],
            "fused": [count_fused(each) for each in of],
            "encoded": [int(counter(each, "kv_chunks_encoded_total")) for each in replicas],
            "loaded_bytes": [loaded_bytes(each) for each in replicas],
            "objects": valkey.dbsize(),
        }
        of_a.close()
        asked_of_a = [question for question, d in zip(pairs, done, strict=True) if d in of[0]]
        later = [answer(question) for question in asked_of_a]
        measured |= {
            "later_answers": len(later),
            "later_fused": count_fused(later),
            "later_whys": whys(later),
            "later_loaded_bytes": loaded_bytes(second) - measured["loaded_bytes"][1],
            "state": front.get("/v1/kb/docs").json()["kv"],
        }
        for document in front.get("/v1/kb/docs/documents").json()["data"]:
            front.delete(f"/v1/kb/docs/documents/{document['id']}").raise_for_status()
        return {**measured, "left": valkey.dbsize()}


def count_fused(done: list[dict[str, Any]]) -> int:
    return sum(each["told"]["reused"] > 0 for each in done)


def whys(done: list[dict[str, Any]]) -> dict[str, int]:
    """Why nothing stored was reused, and how often."""
    return dict(Counter(str(each["told"]["why"]) for each in done if not each["told"]["reused"]))


def loaded_bytes(replica: httpx.Client) -> int:
    return int(counter(replica, "kv_bytes_loaded_total", 'tier="redis"'))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--documents", type=Path, default=REPO / "docs", help="folder of .md files")
    parser.add_argument("--pages", type=int, default=6, help="how many of them")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="how many of ours")
    parser.add_argument("--fleet", action="store_true", help="replicas behind a gateway")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds, for a fleet")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pages = sorted(args.documents.glob("*.md"), key=lambda page: page.name)[: args.pages]
    with tempfile.TemporaryDirectory() as folder:
        run = measure_fleet if args.fleet else measure
        measured = run(args, pages, Path(folder))
    table = Table("what", "value")
    for name, value in measured.items():
        table.add_row(name, str(value))
    Console().print(table)
    finish(
        FLEET_QUESTION if args.fleet else __doc__ or "",
        {**result_header("shared_tier" + "_fleet" * args.fleet, "cpu"), **measured},
        args.out,
    )
    if args.fleet:
        is_bad = measured["left"] or not measured["later_loaded_bytes"]
    else:
        is_bad = measured["encoded_chunks"] or "redis" not in measured["tiers"]
    if is_bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
