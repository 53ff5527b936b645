"""Does a user's ordinary hour get reuse: own documents, one question after the other, a restart?

Starts `kvweave serve` with default settings and a fresh home, uploads a folder of documents and
asks about them over HTTP without a pause. Each question is asked twice, by default and with
`reuse: full`, in drawn order; the figures are paired. Phases, by the clock:

    steady     questions about headings of the documents, popular ones more often
    follow-up  conversations of three turns
    restarted  the server is stopped and started again; then as in the first phase

    python bench/ordinary_hour.py --out bench/results/ordinary_hour-cpu.json
    python bench/ordinary_hour.py --documents 20 --minutes 6,2,3 --load 2

`ratio` is the median over pairs of first token by default over first token in full; `fused` and
`exact` count answers in which chunk KV, or an exact path beyond the preamble, was reused.
`first_fused_s` counts from the end of the upload. `--load N` runs N busy loops beside it all, from
before the first start.
"""

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from common.files import REPO
from common.results import finish, result_header
from product_parts.asking import Reply, ask_chat
from product_parts.servers import RunningServer, own_home, start_kvweave

KB = "own"
MAX_TOKENS = 24
WORDINGS = ("What is said about {}?", "Explain {} in one sentence.", "What should I know of {}?")
FOLLOW_UPS = ("Why is that so?", "What else belongs to it?")
MINUTE_S = 60.0


class Pair(NamedTuple):
    """One question, asked by default and in full."""

    at_s: float  # since the upload ended
    default: Reply
    full: Reply
    chunks_ready: int  # of the knowledge base, just after

    @property
    def ratio(self) -> float:
        return self.default.ttft_ms / self.full.ttft_ms

    @property
    def is_fused(self) -> bool:
        return self.default.tokens["fused"] > 0


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the server would outlive us
    rng = random.Random(args.seed)
    files = sorted(Path(args.docs).rglob("*.md"))[: args.documents]
    headings = find_headings(files)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ordinary-hour-")))
        stack.enter_context(busy_loops(args.load))
        home, root = own_home(folder), folder / "kb"
        steady, talk, restarted = (float(each) * MINUTE_S for each in args.minutes.split(","))
        with serving(args.model, root, home) as server:
            num_chunks = upload(server.http, files)
            began_s = time.perf_counter()
            pairs = {"steady": ask_for(server, steady, began_s, single(headings, rng), rng)}
            pairs["follow-up"] = ask_for(server, talk, began_s, talks(headings, rng), rng)
        with serving(args.model, root, home) as server:
            again_s = time.perf_counter()
            pairs["restarted"] = ask_for(server, restarted, again_s, single(headings, rng), rng)
    phases = {name: figures(found) for name, found in pairs.items() if found}
    whole = [pair for name in ("steady", "follow-up") for pair in pairs[name]]
    first = next((pair.at_s for pair in whole if pair.is_fused), None)
    late = [pair for pair in whole if pair.at_s >= (steady + talk) / 2]
    found = {
        "chunks": num_chunks,
        "first_fused_s": None if first is None else round(first, 1),
        "hour": figures(whole),
        "second_half": figures(late) if late else None,
        "phases": phases,
        "pairs": [told_of(name, pair) for name, found in pairs.items() for pair in found],
    }
    show(found)
    config = {"documents": len(files), "model": args.model, "minutes": args.minutes}
    config |= {"load": args.load, "seed": args.seed}
    header = result_header("ordinary_hour", "cpu")
    finish(__doc__, {**header, "config": config, **found}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", default=str(REPO / "docs"), help="folder of Markdown to upload")
    parser.add_argument("--documents", type=int, default=20, help="files of it")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--minutes", default="40,10,10", help="of each phase")
    parser.add_argument("--load", type=int, default=0, help="busy loops beside it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args()


@contextmanager
def serving(model: str, root: Path, home: Path) -> Iterator[RunningServer]:
    server = start_kvweave("kvweave", model, root, home)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Other programs that want a core each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()


def upload(http: httpx.Client, files: Sequence[Path]) -> int:
    """Return how many chunks the documents became."""
    form = [("file", (path.name, path.read_bytes())) for path in files]
    reply = http.post(f"/v1/kb/{KB}/documents", files=form)
    assert reply.status_code == 200, reply.text
    return int(state_of_kv(http)["chunks_total"])


def state_of_kv(http: httpx.Client) -> dict[str, Any]:
    return dict(http.get(f"/v1/kb/{KB}").json()["kv"])


def find_headings(files: Sequence[Path]) -> list[str]:
    text = "\n".join(path.read_text() for path in files)
    found = [line.lstrip("# ").strip() for line in text.splitlines() if line.startswith("#")]
    return [heading for heading in found if len(heading) > 3]


Messages = list[dict[str, str]]


def single(headings: Sequence[str], rng: random.Random) -> Iterator[Messages]:
    """Questions without a history. The n-th heading is asked about 1/n times as often."""
    order = rng.sample(headings, len(headings))
    weights = [1 / place for place in range(1, len(order) + 1)]
    while True:
        (heading,) = rng.choices(order, weights)
        yield [{"role": "user", "content": rng.choice(WORDINGS).format(heading)}]


def talks(headings: Sequence[str], rng: random.Random) -> Iterator[Messages]:
    """Conversations, turn by turn: whoever takes them appends the answers."""
    for messages in single(headings, rng):
        yield messages
        for words in FOLLOW_UPS:
            messages.append({"role": "user", "content": words})
            yield messages


def ask_for(
    server: RunningServer,
    seconds: float,
    began_s: float,
    questions: Iterator[Messages],
    rng: random.Random,
) -> list[Pair]:
    """Ask one pair after the other until the time is over."""
    pairs: list[Pair] = []
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        messages = next(questions)
        body = {"messages": messages, "kb": KB, "max_tokens": MAX_TOKENS, "temperature": 0}
        replies: dict[str, Reply] = {}
        for name in rng.sample(("default", "full"), 2):
            more = {"reuse": "full"} if name == "full" else {}
            replies[name] = ask_chat(server.http, {**body, **more})
        ready = int(state_of_kv(server.http)["chunks_done"])
        at_s = time.perf_counter() - began_s
        pairs.append(Pair(at_s, replies["default"], replies["full"], ready))
        messages.append({"role": "assistant", "content": replies["default"].text or "-"})
    return pairs


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    default = [pair.default.ttft_ms for pair in pairs]
    full = [pair.full.ttft_ms for pair in pairs]
    return {
        "pairs": len(pairs),
        "fused": sum(pair.is_fused for pair in pairs),
        "ratio": round(statistics.median(pair.ratio for pair in pairs), 3),
        "p50_ms": [round(statistics.median(each)) for each in (default, full)],
        "p95_ms": [round(quantile(each, 0.95)) for each in (default, full)],
        "p95_over_full": round(quantile(default, 0.95) / quantile(full, 0.95), 3),
        "same_answers": sum(pair.default.text == pair.full.text for pair in pairs),
        "chunks_ready": pairs[-1].chunks_ready,
    }


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def told_of(phase: str, pair: Pair) -> dict[str, Any]:
    explain = pair.default.explain or {}
    whys = sorted({chunk["why"] for chunk in explain.get("chunks", ()) if chunk.get("why")})
    return {
        "phase": phase,
        "at_s": round(pair.at_s, 1),
        "ttft_ms": [round(pair.default.ttft_ms), round(pair.full.ttft_ms)],
        "tokens": pair.default.tokens,
        "ready": pair.chunks_ready,
        "why": explain.get("why") or "; ".join(whys) or None,
    }


def show(found: dict[str, Any]) -> None:
    table = Table(title=f"an ordinary hour: {found['chunks']} chunks")
    for name in ("", "pairs", "fused", "ratio", "p50 ms", "in full", "p95 ÷ full", "KV ready"):
        table.add_column(name, justify="left" if not name else "right")
    rows = {"hour": found["hour"], "its second half": found["second_half"], **found["phases"]}
    for name, row in rows.items():
        if row is not None:
            cells = [row["pairs"], row["fused"], row["ratio"], *row["p50_ms"]]
            cells += [row["p95_over_full"], row["chunks_ready"]]
            table.add_row(name, *map(str, cells))
    Console().print(table)
    first = found["first_fused_s"]
    print("first fused answer: " + ("never" if first is None else f"{first:.0f} s"))


if __name__ == "__main__":
    main()
