"""How soon does a stock vLLM give its first token when its chunks are fused by kvweave?

One vLLM (CPU build, `make vllm`) with kvweave's connector and default settings; the same prompts in
turns, several ways. Passages are cut from the pages under docs/. Every question has another choice
and order of chunks, as retrieval has.

    cold       nothing cached: a salt of its own
    prefix     vLLM's own prefix cache, on orders that it has not seen: the preamble, mostly
    fused_0    stored chunk KV as it is
    fused_15   15 % of the chunk rows recomputed
    fused_100  every row recomputed: exact, by kvweave's pass
    repeat     the very prompt again, by vLLM's prefix cache: the bound
    lmcache    LMCache's connector in another vLLM (--lmcache), chunks of --chunk-tokens, after
               each prompt's chunks came once in another order; blending, if that starts

Milliseconds from the request to its first token over HTTP, medians. LMCache is in none of our
environments: --lmcache names the Python of one that has it beside vLLM. Where it does not start or
answer, `lmcache_…_why` is its first error. `kl_15` is the mean divergence of the first token's
distribution at 15 % from cold, over its most likely tokens, in nats.

    python bench/vllm_ttft.py --out bench/results/vllm_ttft-cpu.json
"""

import argparse
import math
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from common.files import REPO
from common.results import finish, result_header
from kvweave.corpus.chunker import Chunker
from kvweave.model.files.locate import locate
from kvweave.text.prompt import Prompt, lay_out
from kvweave.text.tokenizer import Tokenizer

WAYS: dict[str, Mapping[str, Any] | None] = {
    "cold": None,
    "prefix": None,
    "fused_0": {"reuse": "reuse"},
    "fused_15": {"reuse": "weave", "ratio": 0.15},
    # left to itself the connector hands a prompt that is computed as a whole to vLLM
    "fused_100": {"reuse": "weave", "ratio": 1.0, "missing": "encode"},
    "repeat": None,
}
LMCACHE = {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "4"}
LMCACHE_BLEND = {
    "LMCACHE_ENABLE_BLENDING": "True",
    "LMCACHE_USE_LAYERWISE": "True",
    "LMCACHE_BLEND_RECOMPUTE_RATIOS": "0.15",
    "LMCACHE_BLEND_CHECK_LAYERS": "1",
}
QUESTIONS = [
    "What happens when a byte of a stored file has changed?",
    "Which settings may stand in a configuration file, and which of several places wins?",
    "How is a knowledge base searched?",
    "What does the planner weigh before it answers?",
    "How does calibration find the ratio that may be used?",
    "What is computed while the search is still running?",
    "How are rows chosen that are computed again?",
    "What does a second server find that shares a tier?",
]


def cut_pages(tokenizer: Tokenizer, chunk_tokens: int) -> list[tuple[int, ...]]:
    """Chunks of the pages under docs/, whole ones alone so that prompts are about as long."""
    chunker = Chunker(tokenizer, chunk_tokens)
    found: dict[tuple[int, ...], None] = {}
    for page in sorted((REPO / "docs").glob("*.md")):
        for placed in chunker.cut(page.stem, page.read_text()):
            if len(placed.chunk.token_ids) > chunk_tokens // 2:
                found[placed.chunk.token_ids] = None
    return list(found)


def make_prompts(tokenizer: Tokenizer, args: argparse.Namespace) -> list[Prompt]:
    """Prompts of about as many tokens, each with a choice of chunks of its own."""
    chunks, draw = cut_pages(tokenizer, args.chunk_tokens), random.Random(args.seed)
    prompts = []
    for i in range(args.questions):
        taken: list[tuple[int, ...]] = []
        for chunk in draw.sample(chunks[: args.pool], min(args.pool, len(chunks))):
            if sum(map(len, taken)) + len(chunk) <= args.tokens:
                taken.append(chunk)
        prompts.append(lay_out(tokenizer, QUESTIONS[i % len(QUESTIONS)], taken))
    return prompts


def divergence(exact: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL over the tokens that both name, each renormalised there; nats."""
    shared = sorted(exact.keys() & other.keys())
    norms = [math.log(sum(math.exp(of[i]) for i in shared)) for of in (exact, other)]
    terms = ((exact[i] - norms[0], other[i] - norms[1]) for i in shared)
    return sum(math.exp(p) * (p - q) for p, q in terms)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    sys.path.insert(0, str(REPO / "tests"))
    from worlds.vllm_server import VllmServer, usable_cores, wish_of

    model = locate(args.model)
    prompts = make_prompts(Tokenizer(model), args)
    flags = ["--enforce-eager"] if args.eager else []
    extra = {"disk_folder": str(folder / "kv")}
    server = VllmServer(folder, model, extra, *flags, cores=usable_cores())
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    told: list[dict[str, Any]] = []
    apart: list[float] = []
    try:
        for prompt in prompts:  # all chunks are stored, as after a day of questions
            warm = wish_of(prompt, missing="encode", reuse="reuse")
            server.ask(prompt.token_ids, warm, cache_salt="warm")
        for i, prompt in enumerate(prompts):
            found = {}
            for way, how in WAYS.items():
                # ways that must not meet each other's blocks have a salt; the prefix cache has none
                fields = {} if way in ("prefix", "repeat") else {"cache_salt": f"{way} {i}"}
                wish = None if how is None else wish_of(prompt, **how)
                began_s = time.perf_counter()
                found[way] = server.ask(prompt.token_ids, wish, 1, **fields)
                taken[way].append((time.perf_counter() - began_s) * 1e3)
                if how is not None and found[way].told.get("way") != "fused":
                    raise SystemExit(f"{way} was not fused: {found[way].told}")
            apart.append(divergence(found["cold"].top, found["fused_15"].top))
            wish = wish_of(prompt, reuse="weave", ratio=0.15)  # again, for where its time goes
            told.append(server.ask(prompt.token_ids, wish, 2, cache_salt=f"told {i}").told)
    finally:
        server.close()
    medians = {way: statistics.median(times[1:] or times) for way, times in taken.items()}
    tokens = [len(prompt.token_ids) for prompt in prompts]
    return {
        "model": args.model,
        "compiled": not args.eager,
        "questions": len(prompts),
        "prompt_tokens": round(statistics.mean(tokens)),
        "chunks": round(statistics.mean(len(prompt.chunks) for prompt in prompts), 1),
        **{f"{way}_ms": round(value, 1) for way, value in medians.items()},
        **{
            f"{way}_speedup": round(medians["cold"] / medians[way], 2)
            for way in WAYS
            if way != "cold"
        },
        "kl_15": round(statistics.mean(apart), 4),
        "stages_15": {
            name: round(statistics.median(each[name] for each in told), 1)
            for name in ("load_ms", "select_ms", "compute_ms", "fill_ms")
        },
    }


def measure_lmcache(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same prompts through LMCache's connector, blending chunks; where that does not start, as
    the prefix store that it is then."""
    ways = {"blend": {**LMCACHE, **LMCACHE_BLEND}, "prefix": LMCACHE}
    told: dict[str, Any] = {}
    for way, settings in ways.items():
        found, why = run_lmcache(args, folder / way, settings)
        if found:
            return {**told, "lmcache_way": way, **found}
        told[f"lmcache_{way}_why"] = why
    return told


def run_lmcache(
    args: argparse.Namespace, folder: Path, settings: Mapping[str, str]
) -> tuple[dict[str, Any], str]:
    """What was measured, or nothing and why."""
    sys.path.insert(0, str(REPO / "tests"))
    from worlds.vllm_server import StartFailed, VllmServer, usable_cores

    model = locate(args.model)
    tokenizer = Tokenizer(model)
    os.environ |= {**settings, "LMCACHE_CHUNK_SIZE": str(args.chunk_tokens)}
    flags = ["--enforce-eager"] if args.eager else []
    how: dict[str, Any] = {"connector": "LMCacheConnectorV1", "python": args.lmcache}
    try:
        server = VllmServer(folder, model, {}, *flags, cores=usable_cores(), **how)
    except StartFailed as failure:
        return {}, first_error(str(failure))
    finally:
        for name in settings:
            del os.environ[name]
    taken, cached = [], []
    try:
        for prompt in make_prompts(tokenizer, args):
            other = lay_out(tokenizer, "What else?", prompt.chunks[::-1])
            server.ask(other.token_ids)
            began_s = time.perf_counter()
            reply = server.ask(prompt.token_ids, None, 1)
            taken.append((time.perf_counter() - began_s) * 1e3)
            cached.append(reply.cached)
    except (AssertionError, httpx.TransportError):
        return {}, first_error(server.log.read_text())
    finally:
        server.close()
    measured = {
        "lmcache_ms": round(statistics.median(taken[1:] or taken), 1),
        "lmcache_cached_tokens": round(statistics.mean(cached)),
    }
    return measured, ""


def first_error(log: str) -> str:
    """The first line of a log that is an error: what comes behind it follows from it."""
    found = re.search(r"^(?:.*\] )?((?:\w+\.)*\w+(?:Error|Exception)(?:: .+)?)$", log, re.M)
    return found[1] if found else log.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="safetensors: vLLM reads no GGUF")
    parser.add_argument("--tokens", type=int, default=3000, help="of chunks in a prompt")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--pool", type=int, default=40, help="chunks to choose from")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lmcache", type=Path, help="Python of an environment with vLLM, LMCache")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(args, Path(folder))
        if args.lmcache is not None:
            measured |= measure_lmcache(args, Path(folder) / "lmcache")
            if "lmcache_ms" in measured:
                speedup = measured["cold_ms"] / measured["lmcache_ms"]
                measured["lmcache_speedup"] = round(speedup, 2)
    table = Table("what", "value")
    for name, value in measured.items():
        table.add_row(name, str(value))
    Console().print(table)
    finish(__doc__ or "", {**result_header("vllm_ttft", "cpu"), **measured}, args.out)


if __name__ == "__main__":
    main()
