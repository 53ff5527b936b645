"""Does a request on a GPU wait for a compiler or a recording that an earlier one could have had?

After a few requests of each kind, more of other lengths: prompts that are computed, fused ones over
shared chunks and over copies. Kernels that Triton compiles meanwhile are listed with what took them
how long; so are the slowest first tokens. A kernel found in Triton's cache on disk counts too.

    python bench/gpu/stalls.py --out bench/results/gpu_stalls-h200.json
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

from common.gpu_world import STACK
from common.results import finish, result_header, versions
from gpu.shared_world import SharedWorld
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest
from kvweave.model.shapes import SHAPES

SLOW = 3.0  # times the median of its kind: a first token that somebody wonders about
SHOWN = 12  # of these
MOST_CHUNKS, LONGEST_QUESTION = 24, 200


class Compiled(NamedTuple):
    """A kernel that was compiled, or found compiled on disk."""

    kernel: str
    ms: float
    on_disk: bool
    variant: str  # what tells it from others


class CompileLog:
    """Hears of every kernel that is compiled while it is open."""

    def __init__(self) -> None:
        self.found: list[Compiled] = []

    def heard(self, **told: Any) -> None:
        src, times = told["src"], told["times"]
        ms = float(getattr(times, "total", 0)) / 1e3
        constants = {str(k): v for k, v in getattr(src, "constants", {}).items()}
        variant = f"{getattr(src, 'signature', '')} {constants} {getattr(src, 'attrs', '')}"
        name = str(getattr(src, "name", told["metadata"].get("name")))
        self.found.append(Compiled(name, round(ms, 1), bool(told["cache_hit"]), variant))


@contextmanager
def listening() -> Iterator[CompileLog]:
    """Off a GPU there is no Triton, and nothing is heard."""
    log = CompileLog()
    try:
        from triton import knobs
    except ModuleNotFoundError:
        yield log
        return
    before = knobs.compilation.listener
    knobs.compilation.listener = log.heard
    try:
        yield log
    finally:
        knobs.compilation.listener = before


class Kind(NamedTuple):
    """Requests that are alike but for their lengths."""

    name: str
    shares: bool
    request: Callable[[random.Random], EngineRequest]
    first: Sequence[EngineRequest]  # that warm up


def main() -> None:
    args = parse_args()
    world = SharedWorld(args)
    rows = []
    for shares in (True, False):
        for kind in kinds_of(world, shares):
            rows.append(measure(world, kind, args.requests))
            print({name: rows[-1][name] for name in ("kind", "compiled", "p50_ms", "worst_ms")})
    world.store.close()
    result = {
        **result_header("gpu_stalls", args.device), "versions": versions(*STACK),
        "config": {**world.config(), "requests": args.requests},
        "compiled_after_warm_up": sum(row["compiled"] for row in rows),
        "waited_for_compilers_s": round(sum(row["compile_ms"] for row in rows) / 1e3, 1),
        "rows": rows,
    }  # fmt: skip
    finish(__doc__, result, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--requests", type=int, default=60, help="of each kind")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--pages", choices=("raw", "int8"), default="raw", help="of shared chunks")
    parser.add_argument("--pool-gib", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    parser.set_defaults(k=8, zipf=1.0, codec="int8")
    return parser.parse_args()


def kinds_of(world: SharedWorld, shares: bool) -> list[Kind]:
    """The kinds that one engine is asked, whose fused requests share chunks or copy them."""

    def of(ratio: float | None, chunks: int, asked: int, draw: random.Random) -> EngineRequest:
        places = draw.sample(range(world.args.chunks), chunks)
        request = world.request(places, ratio, answer=3)
        words = tuple(draw.randrange(10, world.spec.vocab_size) for _ in range(asked))
        return replace(request, question=words, use_tree=ratio is not None)

    def any_of(ratio: float | None, draw: random.Random) -> EngineRequest:
        fewest = 0 if ratio is None else 1
        return of(ratio, draw.randint(fewest, MOST_CHUNKS), draw.randint(1, LONGEST_QUESTION), draw)

    named = (("computed", None), ("nothing recomputed", 0.0), ("15 % recomputed", 0.15))
    found = []
    for name, ratio in named:
        if ratio is None and not shares:
            continue  # as before
        told = name if ratio is None else f"{name}, {'shared' if shares else 'copied'}"
        sizes = ((3, 60), (3, 60), (MOST_CHUNKS, 60), (MOST_CHUNKS, 60), (3, 2), (3, 6))
        first = [of(ratio, chunks, asked, random.Random(0)) for chunks, asked in sizes]
        found.append(Kind(told, shares, partial(any_of, ratio), first))
    return found


def measure(world: SharedWorld, kind: Kind, count: int) -> dict[str, Any]:
    draw = random.Random(1)
    with Engine(world.decoder, world.engine_config(shares=kind.shares)) as engine:
        engine.run_alone(partial(engine.pin_preamble, world.preamble))
        with listening() as before:
            began_s = time.perf_counter()
            while not engine.is_warm:
                time.sleep(0.01)
            for request in kind.first:
                first_token_ms(engine, request)
            warm_s = time.perf_counter() - began_s
        waits, compiled = [], []
        for _ in range(count):
            request = kind.request(draw)
            with listening() as log:
                ms = first_token_ms(engine, request)
            waits.append((round(ms, 1), len(request.prompt_ids), [one.kernel for one in log.found]))
            compiled += log.found
    each = [ms for ms, _, _ in waits]
    middle = statistics.median(each)
    slow = sorted((wait for wait in waits if wait[0] > SLOW * middle), reverse=True)
    return {
        "kind": kind.name, "warm_up_s": round(warm_s, 1), "warm_up_compiled": len(before.found),
        "compiled": len(compiled), "compile_ms": round(sum(one.ms for one in compiled), 1),
        "p50_ms": middle, "worst_ms": max(each), "num_slow": len(slow), "slow": slow[:SHOWN],
        "kernels": sorted({one.kernel for one in compiled}),
        "variants": [list(one) for one in compiled[:SHOWN]],
    }  # fmt: skip


def first_token_ms(engine: Engine, request: EngineRequest) -> float:
    ticket = engine.submit(request)
    for _ in ticket:
        pass
    line = ticket.timeline
    assert line.first_token_s is not None, "it was answered"
    return (line.first_token_s - line.submitted_s) * 1e3


if __name__ == "__main__":
    main()
