"""What does a user with default settings get on a GPU, over full prefill, by model and prompt?

    python bench/serve_gpu.py --out bench/results/product-h200.json
    python bench/serve_gpu.py --quick                          # on a CPU, tiny, two minutes

Starts `kvweave serve` with its defaults and a fresh home for each model, uploads documents to
knowledge bases of several chunk sizes and asks over HTTP; nothing is calibrated or measured by
hand. A model `random:NAME` is `--shape NAME`: random weights, fused by permission; `stranger:NAME`
and `noise:NAME` are models that no packaged table names (product_parts/strangers.py). The parts:

    upload  from the end of the first upload on, one question after the other until one is fused.
            Then, and at once for other knowledge bases, chunk KV is made to the end (`prepare`):
            tokens per second, and their share of those that full prefill computes in this run
    calibrate  what a model without tables finds out on the documents while nobody asks, at most
            `--seconds`: questions, seconds, what the gate lets through
    ttft    each question by default and with `reuse: full`, in drawn order, each pair on its own;
            before each request the server may finish what it does when idle. Time to the first
            token is the client's; `server_ms` is all that the server counts before it
    kl      `/v1/compare` of full and auto on questions that were not asked before
    load    requests per second, open loop, at which the 95th percentile of the time to the first
            token stays within `--bound` times full prefill's unloaded one; default and full

Chunks are as long as a workload says (`20x400`: 20 chunks of 400 tokens at most), which is the one
setting that is not the default. Each part of a model ends after `--seconds`; the result is saved
after each part. Documents are this repository's pages, without their headings' marks.
"""

import argparse
import itertools
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from common.results import finish, result_header, save_run, versions
from kvweave.app.library.runtime import RANDOM
from product_parts.asking import Reply, ask_chat
from product_parts.figures import percentile
from product_parts.pages import MAX_TOKENS, Workload, ask_about, make_bases, read_documents
from product_parts.servers import RunningServer, own_home, settle, start_kvweave
from product_parts.strangers import prepare_model
from throughput.open_loop import Probe, alone, highest_rate, probe

PARTS = ("upload", "calibrate", "ttft", "kl", "load")
MODELS = f"{RANDOM}llama-3.1-8b,qwen2.5-coder-0.5b,qwen2.5-coder-1.5b"
WORKLOADS = {"": "5x400,10x400,20x800", RANDOM: "20x400,20x1600"}  # of models, and of shapes
WARM_UPS = 2  # pairs of a workload before any counts
SETTLE_S = 0.5
BOUND = 5.0  # times full prefill's unloaded time to the first token
KL_TOKENS = 16
POLL_S = 0.1
ENOUGH = 108  # questions after which an open gate is asked no more


class Pair(NamedTuple):
    """One question, by default and in full."""

    default: Reply
    full: Reply

    @property
    def ratio(self) -> float:
        return self.default.ttft_ms / self.full.ttft_ms


class Bench:
    """Measures one model after the other, and saves after each part."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.models: dict[str, dict[str, Any]] = {}
        self.began_s = time.perf_counter()
        self.files = read_documents(args.chars)

    def measure(self, model: str, folder: Path) -> None:
        """All parts of one model, on one server."""
        rows = self.models[model] = {}
        given = self.args.workloads or WORKLOADS[RANDOM if model.startswith(RANDOM) else ""]
        sizes = [each.split("x") for each in given.split(",")]
        workloads = [Workload(int(k), int(tokens)) for k, tokens in sizes]
        home, root = own_home(folder), folder / "kb"
        served = prepare_model(model, folder / "model")
        make_bases(served, root, {each.chunk_tokens for each in workloads})
        began_s = time.perf_counter()
        server = start_kvweave("kvweave", served, root, home, self.args.device)
        try:
            rows["start_s"] = round(time.perf_counter() - began_s, 1)
            run = ModelRun(self.args, server, workloads, self.files, rows)
            for part in PARTS:
                if part in self.args.parts:
                    print(f"-- {model}: {part}", flush=True)
                    began_s = time.perf_counter()
                    run.measure(part)
                    rows.setdefault("took_s", {})[part] = round(time.perf_counter() - began_s, 1)
                    self.save()
        finally:
            rows["log"] = [line[:300] for line in _warnings(server.process.log)]
            server.close()

    def result(self) -> dict[str, Any]:
        device = "cuda" if self.args.device != "cpu" and _has_cuda() else "cpu"
        config = {"parts": self.args.parts, "max_tokens": MAX_TOKENS, "seconds": self.args.seconds}
        config |= {"bound": self.args.bound, "stack": versions("torch", "triton")}
        took_s = round(time.perf_counter() - self.began_s)
        header = result_header("product", device)  # its part of that question, on a GPU
        return {**header, "config": config, "took_s": took_s, "models": self.models}

    def save(self) -> None:
        if self.args.out is not None:
            save_run(__doc__, self.result(), self.args.out, summary)


class ModelRun:
    """The parts, on a server that runs. One thread."""

    def __init__(
        self,
        args: argparse.Namespace,
        server: RunningServer,
        workloads: Sequence[Workload],
        files: dict[str, str],
        rows: dict[str, Any],
    ) -> None:
        self._args, self._server, self._workloads = args, server, workloads
        self._files, self._rows = files, rows
        self._rng = random.Random(args.seed)
        self._questions = ask_about(files, random.Random(args.seed))
        self._uploaded: set[str] = set()

    def measure(self, part: str) -> None:
        for base in {each.kb: each for each in self._workloads}.values():
            if base.kb not in self._uploaded:  # whatever is measured needs documents
                self._uploaded.add(base.kb)
                until_fused = part == "upload" and len(self._uploaded) == 1
                row = self._upload(base, until_fused=until_fused)
                self._rows.setdefault("upload", {})[base.kb] = row
        if part == "calibrate" and not self._is_random:
            self._rows["calibrate"] = self._calibrate(self._workloads[0])
        if part == "ttft":
            for workload in self._workloads:
                self._rows.setdefault("ttft", {})[workload.name] = self._ttft(workload)
        if part == "kl" and not self._is_random:
            self._rows["kl"] = self._kl(self._workloads[0])
        if part == "load":
            self._rows["load"] = self._load(self._workloads[0])
        for name, row in self._rows.get("upload", {}).items():
            rates = [each["prefill_tokens_per_s"] for each in self._rows.get("ttft", {}).values()]
            if rates and row["tokens_per_s"] is not None:
                row["of_prefill"] = round(row["tokens_per_s"] / max(rates), 3)
                print(f"chunk KV of {name}: {row['of_prefill']:.0%} of prefill's rate")

    @property
    def _is_random(self) -> bool:
        told = self._server.http.get("/v1/models").json()["data"][0]
        return str(told["id"]).startswith(RANDOM)

    # ---- upload

    def _upload(self, workload: Workload, *, until_fused: bool) -> dict[str, Any]:
        http, budget_s = self._server.http, self._args.seconds
        began_s = time.perf_counter()
        form = [("file", (name, text.encode())) for name, text in self._files.items()]
        reply = http.post(f"/v1/kb/{workload.kb}/documents", files=form)
        assert reply.status_code == 200, reply.text
        ended_s = time.perf_counter()
        row: dict[str, Any] = {"upload_s": round(ended_s - began_s, 1), "first_fused_s": None}
        asked = 0
        while until_fused and time.perf_counter() - ended_s < budget_s:
            asked += 1
            said = ask_chat(http, workload.body(next(self._questions)))
            if said.tokens["fused"]:
                row["first_fused_s"] = round(time.perf_counter() - ended_s, 1)
                break
            row["why"] = (said.explain or {}).get("why")
        row |= {"asked": asked, **self._prepare(workload)}
        print(f"{workload.kb}: {json.dumps(row)}", flush=True)
        return row

    def _prepare(self, workload: Workload) -> dict[str, Any]:
        """Have all chunk KV made, and time it."""
        http, place = self._server.http, f"/v1/kb/{workload.kb}"
        with suppress(httpx.HTTPStatusError):  # where none is wanted the state says so
            http.post(f"{place}/prepare").raise_for_status()
        told = http.get(place).json()
        first, began_s = told["kv"]["chunks_done"], time.perf_counter()
        moved_s = began_s
        while self._is_making(told["kv"]) and moved_s - began_s < self._args.seconds:
            time.sleep(POLL_S)
            told = http.get(place).json()
            moved_s = time.perf_counter()
        kv, took_s = told["kv"], moved_s - began_s
        made, num_chunks = kv["chunks_done"] - first, told["chunks"]
        mean_tokens = told["tokens"] / max(1, num_chunks)
        rate = made / took_s if made > 0 and took_s > POLL_S else None
        return {
            "state": kv["state"],
            "kv_why": kv["why"],
            "chunks": num_chunks,
            "chunk_tokens": round(mean_tokens),
            "made": made,
            "made_s": round(took_s, 1),
            "chunks_per_s": None if rate is None else round(rate, 1),
            "tokens_per_s": None if rate is None else round(rate * mean_tokens),
        }

    def _calibrate(self, workload: Workload) -> dict[str, Any]:
        """Wait until the documents were asked enough, while nobody else asks."""
        began_s, opened_s = time.perf_counter(), None
        while True:
            told = self._server.http.get(f"/v1/kb/{workload.kb}").json()["kv"]["calibration"]
            waited_s = time.perf_counter() - began_s
            if told is not None and told["state"] == "open" and opened_s is None:
                opened_s = round(waited_s, 1)
            is_over = told is None or told["state"] == "shut" or told["asked"] >= ENOUGH
            if is_over or waited_s > self._args.seconds:
                break
            time.sleep(POLL_S)
        row = {"waited_s": round(waited_s, 1), "opened_s": opened_s, **(told or {})}
        print(f"calibration: {json.dumps(row)}", flush=True)
        return row

    @staticmethod
    def _is_making(kv: dict[str, Any]) -> bool:
        """Whether chunks are still to come; copies for the front of a prompt come behind them."""
        return kv["state"] == "making" and kv["chunks_done"] < kv["chunks_total"]

    # ---- time to the first token

    def _ttft(self, workload: Workload) -> dict[str, Any]:
        pairs: list[Pair] = []
        for _ in range(WARM_UPS):
            self._pair(workload)
        until_s = time.perf_counter() + self._args.seconds
        while len(pairs) < self._args.pairs and (not pairs or time.perf_counter() < until_s):
            pairs.append(self._pair(workload))
        row = figures(pairs)
        print(f"{workload.name}: {json.dumps(row)}", flush=True)
        return row

    def _pair(self, workload: Workload) -> Pair:
        question = next(self._questions)
        replies: dict[str, Reply] = {}
        for way in self._rng.sample(("default", "full"), 2):
            more = {"reuse": "full"} if way == "full" else {}
            settle([self._server.process], SETTLE_S)
            replies[way] = ask_chat(self._server.http, workload.body(question, **more))
        return Pair(**replies)

    # ---- quality

    def _kl(self, workload: Workload) -> dict[str, Any]:
        found: list[float] = []
        same = fused = 0
        until_s = time.perf_counter() + self._args.seconds
        while len(found) < self._args.pairs and (not found or time.perf_counter() < until_s):
            events = self._compare(workload, next(self._questions))
            quality = next(e["quality"] for e in events if e.get("way") == 1 and "quality" in e)
            done = next(e["done"] for e in events if e.get("way") == 1 and "done" in e)
            found.append(quality["kl_nats"])
            same += quality["same_first_token"]
            fused += done["explain"]["tokens"]["reused"] > 0
        row = {
            "workload": workload.name,
            "questions": len(found),
            "fused": fused,
            "kl_mean": round(statistics.fmean(found), 5),
            "kl_max": round(max(found), 5),
            "same_first_token": same,
        }
        print(f"KL: {json.dumps(row)}", flush=True)
        return row

    def _compare(self, workload: Workload, question: str) -> list[dict[str, Any]]:
        ways = [{"reuse": "full"}, {"reuse": "auto"}]
        body = workload.body(question, ways=ways, max_tokens=KL_TOKENS)
        del body["temperature"]
        with self._server.http.stream("POST", "/v1/compare", json=body) as reply:
            lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    # ---- requests per second

    def _load(self, workload: Workload) -> dict[str, Any]:
        """The highest rate within the bound, by default and in full, on questions of one draw."""
        asked = list(itertools.islice(self._questions, 4096))
        unloaded = alone(lambda n: self._stream(workload, asked[n], "full"), range(5))
        total_s = statistics.median(one.token_s[-1] for one in unloaded)
        bound_s = self._args.bound * statistics.median(one.token_s[0] for one in unloaded)
        row: dict[str, Any] = {"workload": workload.name, "bound_ms": round(bound_s * 1e3)}
        probes: list[dict[str, Any]] = []
        for way in ("full", "default"):
            until_s = time.perf_counter() + self._args.seconds

            def probe_at(rate: float, way: str = way, until_s: float = until_s) -> bool:
                if time.perf_counter() > until_s:
                    return False  # no time is left: what is known stands
                window_s = max(self._args.window, 2 * bound_s)
                numbers = random.Random(len(probes)).sample(range(4096), 4096)
                seen: Probe = probe(
                    lambda n: self._stream(workload, asked[n], way),
                    *(rate, window_s, bound_s, numbers, len(probes)),
                )
                probes.append({"way": way, **seen.numbers()})
                probes[-1]["errors"] = len(seen.numbers()["errors"])
                print(json.dumps(probes[-1]), flush=True)
                return seen.within

            start = 1.4 * row["full_per_s"] if row.get("full_per_s") else 0.9 / total_s
            row[f"{way}_per_s"] = round(highest_rate(probe_at, start, self._args.probes), 3)
        row["over_full"] = round(row["default_per_s"] / max(1e-9, row["full_per_s"]), 2)
        return {**row, "probes": probes}

    def _stream(self, workload: Workload, question: str, way: str) -> Iterator[str]:
        """The tokens of one request, as a client hears them."""
        more = {"reuse": "full"} if way == "full" else {}
        body = workload.body(question, stream=True, **more)
        with self._server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                reply.read()
                raise RuntimeError(f"{reply.status_code}: {reply.text[:200]}")
            for line in reply.iter_lines():
                if line.startswith("data: {") and has_text(line):
                    yield line


def has_text(line: str) -> bool:
    """Whether an event brings text: the first one has the role alone."""
    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
    return bool((choices[0].get("delta") or {}).get("content"))


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """What pairs of answers say of one workload."""
    default, full = [p.default.ttft_ms for p in pairs], [p.full.ttft_ms for p in pairs]
    tokens = {name: sum(p.default.tokens[name] for p in pairs) for name in pairs[0].default.tokens}
    prompt = statistics.fmean(p.full.prompt_tokens for p in pairs)
    whys = [(p.default.explain or {}).get("why") for p in pairs if not p.default.tokens["fused"]]
    return {
        "pairs": len(pairs),
        "prompt_tokens": round(prompt),
        "p50_over_full": round(statistics.median(p.ratio for p in pairs), 3),
        "p95_over_full": round(percentile(default, 95) / percentile(full, 95), 3),
        "default_ms": [round(percentile(default, each), 1) for each in (50, 95)],
        "full_ms": [round(percentile(full, each), 1) for each in (50, 95)],
        "server_ms": {
            "default": _server_ms([p.default for p in pairs]),
            "full": _server_ms([p.full for p in pairs]),
        },
        "fused_share": round(sum(p.default.tokens["fused"] > 0 for p in pairs) / len(pairs), 3),
        "tokens": tokens,
        "why_not": sorted({str(why) for why in whys if why}),
        "prefill_tokens_per_s": round(prompt / percentile(full, 50) * 1e3),
    }


def _server_ms(replies: Sequence[Reply]) -> dict[str, float]:
    """Medians of the stages in front of the first token, by the server's own clock."""
    told = [reply.explain["timeline_ms"] for reply in replies if reply.explain is not None]
    stages = ("waiting", "searching", "loading", "computing")
    return {name: round(statistics.median(each[name] or 0 for each in told), 2) for name in stages}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the newest run in which a shape of 8 billion weights was asked."""
    for run in reversed(runs):
        rows = run.get("models", {}).get(f"{RANDOM}llama-3.1-8b", {}).get("ttft", {})
        if rows:
            by_size = {"8k": (6_000, 12_000), "32k": (24_000, 48_000)}
            return {
                f"ttft_{name}_over_full": next(
                    (r["p50_over_full"] for r in rows.values() if a <= r["prompt_tokens"] <= b),
                    None,
                )
                for name, (a, b) in by_size.items()
            }
    return {}


def _warnings(log: Path) -> list[str]:
    """The last lines of a server's log that are more than news."""
    words = ("WARN", "warn", "ERROR", "rror:", "measured in", "RANDOM")
    return [line for line in log.read_text().splitlines() if any(w in line for w in words)][-12:]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=MODELS, help="names, or random:SHAPE")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--workloads", help="KxTOKENS,… in place of each model's own")
    parser.add_argument("--device", default="auto", help="of the servers")
    parser.add_argument("--seconds", type=float, default=25.0, help="of a part, by workload")
    parser.add_argument("--pairs", type=int, default=24, help="of a workload, at most")
    parser.add_argument("--chars", type=int, default=240_000, help="of the documents, at most")
    parser.add_argument("--bound", type=float, default=BOUND)
    parser.add_argument("--window", type=float, default=6.0, help="seconds of arrivals per rate")
    parser.add_argument("--probes", type=int, default=5, help="rates tried each way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny, for a machine without a GPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.models = f"{RANDOM}tiny" if args.models == MODELS else args.models
        args.workloads = args.workloads or "5x128,4x256"
        args.seconds, args.pairs, args.chars, args.probes, args.window = 8.0, 4, 30_000, 2, 2.0
    args.parts = args.parts.split(",")
    if wrong := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(wrong)}; there are {', '.join(PARTS)}")
    return args


@contextmanager
def fresh_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="serve-gpu-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or a server would outlive us
    bench = Bench(args)
    for model in args.models.split(","):
        with fresh_folder() as folder:
            print(f"== {model}", flush=True)
            try:
                bench.measure(model, folder)
            except (Exception, SystemExit) as error:  # the other models still count
                bench.models[model]["error"] = f"{type(error).__name__}: {error}"[-2000:]
                print(bench.models[model]["error"], flush=True)
                bench.save()
    show(bench.models)
    finish(__doc__, bench.result())


def show(models: dict[str, dict[str, Any]]) -> None:
    table = Table(title="time to the first token by default over full prefill")
    for name in ("model", "prompt", "p50", "p95", "full ms", "fused", "pairs"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for model, rows in models.items():
        for row in rows.get("ttft", {}).values():
            cells = [row["prompt_tokens"], row["p50_over_full"], row["p95_over_full"]]
            cells += [row["full_ms"][0], row["fused_share"], row["pairs"]]
            table.add_row(model, *map(str, cells))
    Console().print(table)


if __name__ == "__main__":
    main()
