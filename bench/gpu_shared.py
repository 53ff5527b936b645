"""What does one copy of every chunk on the device bring: room, decode, time to first token, load?

Random weights of a real shape; 1,000 chunks of which requests of 8K tokens take some, popular ones
more often (Zipf). Chunk KV lies in host memory and, once used, in pages that all requests share, as
it is or in 8 bits (`--pages int8`).

    capacity     requests that one pool holds at once: a copy each, and shared
    decode       a step over shared chunks (bench/gpu/shared_decode.py)
    ttft         through the engine, chunks on the device, against full prefill
    planner      what the planner chooses against full prefill, over a mixed stream
                 (bench/gpu/shared_planner.py)
    throughput   requests per second whose 95th percentile of the time to the first token stays
                 within 5 times full prefill's unloaded one: full, a copy each, shared

    python bench/gpu_shared.py --out bench/results/gpu_shared-h200.json
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent)

import torch

from common.gpu_world import STACK
from common.results import finish, result_header, save_run, versions
from gpu.shared_world import CHUNK_TOKENS, SharedWorld
from kvweave.engine.engine import Engine
from kvweave.model.shapes import SHAPES
from throughput.open_loop import highest_rate, probe

PARTS = ("capacity", "decode", "ttft", "planner", "throughput")
RATIOS = (0.0, 0.15)
BOUND = 5.0  # times full prefill's unloaded TTFT
PATIENCE_S = 20.0  # for one prompt more to be computed
MOST = 4096  # requests of one draw


def main() -> None:
    args = parse_args()
    began_s = time.perf_counter()
    world = SharedWorld(args)
    say(f"set up in {time.perf_counter() - began_s:.1f} s")
    result: dict[str, Any] = {
        **result_header("gpu_shared", args.device), "versions": versions(*STACK),
        "config": world.config(),
    }  # fmt: skip
    parts = {
        "capacity": measure_capacity,
        "decode": measure_decode,
        "ttft": measure_ttft,
        "planner": measure_planner,
        "throughput": measure_throughput,
    }
    for name, measure in parts.items():
        if name in args.parts.split(","):
            try:
                result |= measure(world)
                if args.out is not None:  # a run that is cut short leaves what it has
                    save_run(__doc__, result, args.out)
            except Exception as error:  # the other parts are worth having
                result[f"{name}_error"] = f"{type(error).__name__}: {error}"
                say(result[f"{name}_error"])
    world.store.close()
    result["took_s"] = round(time.perf_counter() - began_s, 1)
    finish(__doc__, result, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--chunks", type=int, default=1000)
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS)
    parser.add_argument("--k", type=int, default=32, help="chunks in every prompt")
    parser.add_argument("--zipf", type=float, default=1.0, help="how much popular chunks lead")
    parser.add_argument("--codec", default="int8", help="of chunk KV in host memory")
    parser.add_argument("--pages", choices=("raw", "int8"), default="raw", help="of shared chunks")
    parser.add_argument("--pool-gib", type=float, default=60.0)
    parser.add_argument("--sizes", default="8k=32,32k=128", help="of ttft: name=chunks")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="in throughput")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7, help="of planner: prompts of each kind")
    parser.add_argument("--answer", type=int, default=16, help="tokens, in throughput")
    parser.add_argument("--window", type=float, default=6.0, help="seconds of arrivals per rate")
    parser.add_argument("--probes", type=int, default=4, help="rates tried per mode")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


@contextmanager
def serving(world: SharedWorld, *, shares: bool) -> Iterator[Engine]:
    """An engine of its own. The one before is gone by now, if nobody holds it: two pools are too
    much, so each is used in a function of its own."""
    gc.collect()
    if world.decoder.device.type == "cuda":
        torch.cuda.empty_cache()
    with Engine(world.decoder, world.engine_config(shares=shares)) as engine:
        engine.run_alone(partial(engine.pin_preamble, world.preamble))
        yield engine


# ---- capacity


def measure_capacity(world: SharedWorld) -> dict[str, Any]:
    """Prompts that are computed and held: how many fit before the next one has to wait."""
    rows = []
    for ratio in RATIOS:
        copied = held_at_once(world, ratio, shares=False)
        shared = held_at_once(world, ratio, shares=True)
        gain = shared["requests"] / copied["requests"]
        rows.append({"ratio": ratio, "copied": copied, "shared": shared, "gain": round(gain, 2)})
        say(f"capacity at {ratio:g}: {copied} and {shared}")
    return {
        "capacity": rows,
        **{f"capacity_{round(100 * row['ratio'])}": row["gain"] for row in rows},
    }


def held_at_once(world: SharedWorld, ratio: float, *, shares: bool) -> dict[str, Any]:
    with serving(world, shares=shares) as engine:
        tickets = []
        for places in world.stream(MOST, seed=7):
            ticket = engine.submit(world.request(places, ratio, answer=64), held=True)
            until_s = time.perf_counter() + PATIENCE_S
            while ticket.timeline.prefilled_s is None and not ticket.is_done:
                stats = engine.stats()
                if stats["waiting"] and not stats_change(engine, ticket):
                    break
                if time.perf_counter() > until_s:
                    break
                time.sleep(0.0005)
            if ticket.timeline.prefilled_s is None:
                ticket.cancel()
                break
            tickets.append(ticket)
        engine.run_alone(engine.check_integrity)
        stats = engine.stats()
        found = {
            "requests": len(tickets), "pages_used": stats["pages_used"],
            "chunk_pages": stats.get("chunk_pages", 0), "preemptions": stats["preemptions"],
        }  # fmt: skip
        for ticket in tickets:
            ticket.cancel()
        for ticket in tickets:
            ticket.wait()
    return found


def stats_change(engine: Engine, ticket: Any) -> bool:
    """Whether a request that waits is let in within some steps of an engine with nothing else."""
    for _ in range(50):
        if ticket.timeline.admitted_s is not None or not engine.stats()["waiting"]:
            return True
        time.sleep(0.005)
    return ticket.timeline.admitted_s is not None


# ---- time to the first token


def measure_ttft(world: SharedWorld) -> dict[str, Any]:
    """Alone on the engine, in orders never seen; chunks lie in shared pages, or in host memory."""
    sizes = [(n, int(c)) for n, c in (each.split("=") for each in world.args.sizes.split(","))]
    rows = [*ttft_shared(world, sizes), *ttft_copied(world, *sizes[0])]
    gains = {
        f"ttft_{row['size']}_{round(100 * row['ratio'])}": row["x"] for row in rows if "x" in row
    }
    return {"ttft": rows, **gains}


def ttft_shared(world: SharedWorld, sizes: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with serving(world, shares=True) as engine:
        for name, k in sizes:
            full = first_tokens(world, engine, k, None)
            rows.append({"size": name, "mode": "full", "ms": full})
            for ratio in RATIOS:
                ms = first_tokens(world, engine, k, ratio)
                gain = round(full / ms, 2)
                rows.append({"size": name, "mode": "device", "ratio": ratio, "ms": ms, "x": gain})
                say(f"ttft {rows[-1]}, full {full} ms")
    return rows


def ttft_copied(world: SharedWorld, name: str, k: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with serving(world, shares=False) as engine:
        for ratio in RATIOS:
            ms = first_tokens(world, engine, k, ratio)
            rows.append({"size": name, "mode": "host, a copy", "ratio": ratio, "ms": ms})
            say(f"ttft {rows[-1]}")
    return rows


def first_tokens(world: SharedWorld, engine: Engine, k: int, ratio: float | None) -> float:
    """Median milliseconds from `submit` to the first token."""
    found = []
    orders = world.stream(1, seed=k, k=k) * (world.args.repeats + 4)
    for turn, places in enumerate(orders):  # the first ones bring chunks, compile and record
        mixed = [*places[turn:], *places[:turn]]
        ticket = engine.submit(world.request(mixed, ratio))
        for _ in ticket:
            pass
        assert ticket.timeline.first_token_s is not None, "it was answered"
        found.append((ticket.timeline.first_token_s - ticket.timeline.submitted_s) * 1e3)
    return round(statistics.median(found[4:]), 2)


# ---- what the planner chooses


def measure_planner(world: SharedWorld) -> dict[str, Any]:
    from gpu.shared_planner import measure

    with serving(world, shares=True) as engine:
        found: dict[str, Any] = measure(world, engine, world.args.rounds, say)
    return found


# ---- requests per second


def measure_throughput(world: SharedWorld) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    rates: dict[tuple[str, float | None], float] = {}
    bound_s, full_s = 0.0, 0.0
    ratios = sorted(world.args.ratios, reverse=True)
    modes = [("full", None), *((m, r) for r in ratios for m in ("copied", "shared"))]
    for mode, ratio in modes:
        found = rate_of(world, mode, ratio, bound_s, cells)
        rates[mode, ratio] = found.rate
        if mode == "full":
            full_s, bound_s = found.unloaded_s, BOUND * found.unloaded_s
    over = {
        (f"throughput_over_{name}", ratio): round(
            rates["shared", ratio] / max(1e-9, rates[base]), 2
        )
        for ratio in ratios
        for name, base in (("full", ("full", None)), ("fused", ("copied", ratio)))
    }
    return {
        "throughput": cells,
        "requests_per_s": {f"{mode} {ratio}": round(r, 2) for (mode, ratio), r in rates.items()},
        "ttft_bound_ms": round(bound_s * 1e3),
        "full_unloaded_ms": round(full_s * 1e3, 1),
        **{name: value for (name, ratio), value in over.items() if ratio == RATIOS[-1]},
        **{f"{n}_at_{100 * r:g}": value for (n, r), value in over.items() if r != RATIOS[-1]},
    }


class Rate(NamedTuple):
    """What one mode bears."""

    rate: float
    unloaded_s: float


def rate_of(
    world: SharedWorld, mode: str, ratio: float | None, bound_s: float, cells: list[dict[str, Any]]
) -> Rate:
    """The highest rate within the bound; 0: it is 5 times this mode's own, which is full's."""
    with serving(world, shares=mode == "shared") as engine:
        unloaded_s, decode_s = warm(world, engine, ratio)
        prober = Prober(world, engine, mode, ratio, bound_s or BOUND * unloaded_s, cells)
        rate = highest_rate(prober, 0.9 / (unloaded_s + decode_s / 4), world.args.probes)
    say(f"{mode} {ratio}: {rate:.2f} requests/s; unloaded {unloaded_s * 1e3:.1f} ms")
    return Rate(rate, unloaded_s)


def warm(world: SharedWorld, engine: Engine, ratio: float | None) -> tuple[float, float]:
    """Fill pages, compile and record; then seconds to the first token, and from there to the end,
    of a request alone."""
    answer = world.args.answer
    crowd = [
        engine.submit(world.request(places, ratio, answer=answer))
        for places in world.stream(12 if ratio is None else 100, seed=1)
    ]
    for ticket in crowd:
        for _ in ticket:
            pass
    firsts, decodes = [], []
    for places in world.stream(4, seed=2):
        ticket = engine.submit(world.request(places, ratio, answer=answer))
        for _ in ticket:
            pass
        line = ticket.timeline
        assert line.first_token_s is not None, "it was answered"
        assert line.finished_s is not None, "it is over"
        firsts.append(line.first_token_s - line.submitted_s)
        decodes.append(line.finished_s - line.first_token_s)
    return min(firsts), min(decodes)


class Prober:
    """Offers a rate to an engine and notes what came of it. True: the bound was kept."""

    def __init__(
        self,
        world: SharedWorld,
        engine: Engine,
        mode: str,
        ratio: float | None,
        bound_s: float,
        cells: list[dict[str, Any]],
    ) -> None:
        self._world, self._engine = world, engine
        self._mode, self._ratio = mode, ratio
        self._bound_s = bound_s
        self._cells = cells
        self._probes = 0

    def __call__(self, rate: float) -> bool:
        world = self._world
        self._probes += 1
        seed = 10 + self._probes  # questions of their own, the same for all modes
        window_s = max(world.args.window, 3 * self._bound_s)
        some = world.stream(round(2 * rate * window_s) + 64, seed)
        answer = world.args.answer

        def serve(number: int) -> Iterator[int]:
            request = world.request(some[number], self._ratio, answer=answer)
            for choice in self._engine.submit(request):
                yield choice.token_id

        found = probe(serve, rate, window_s, self._bound_s, range(len(some)), seed)
        self._cells.append({"mode": self._mode, "ratio": self._ratio, **found.numbers()})
        say(f"  {self._mode} {self._ratio} at {rate:.2f}/s: {found.numbers()}")
        return found.within


# ---- decode


def measure_decode(world: SharedWorld) -> dict[str, Any]:
    from gpu.shared_decode import measure

    found: dict[str, Any] = measure(world.decoder, coded=world.args.pages == "int8")
    return found


def say(words: str) -> None:
    print(words, flush=True)


if __name__ == "__main__":
    main()
