"""How many tokens per second does a GPU decode, with steps played from CUDA graphs and without?

Random weights of a real shape. `steps`: one row of each sequence over paged KV of random numbers,
both modes in turn at every step, tokens on the host at the end of each. `engine`: the same through
the engine, whose prompts are computed first and held until all are there.

    python bench/gpu/decode.py --out bench/results/gpu_decode-h200.json
"""

import argparse
import gc
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch

from common.results import finish, result_header
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.page_manager import make_pool
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.runner import Runner
from kvweave.engine.sampling import Sampling
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.model.recorded_decode import RecordedDecode, open_recorded
from kvweave.model.rows import Rows
from kvweave.model.shapes import SHAPES, random_decoder

MODES = {"plain": 0, "recorded": 64}  # EngineConfig.recorded_rows
SETTLING = 12  # steps of a size before they count: compiled, recorded, clocks up


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = random_decoder(SHAPES[args.shape], device, dtype)
    began_s = time.perf_counter()
    steps = measure_steps(args, decoder)
    drop_memory(device)
    engine = [measure_engine(args, decoder, batch) for batch in args.engine]
    rows = {f"b{row['batch']}": row for row in steps}
    results = {
        "steps": steps,
        "engine": engine,
        **{f"tokens_per_s_{name}": row.get("recorded_tokens_per_s") for name, row in rows.items()},
        **{f"speedup_{name}": row.get("speedup") for name, row in rows.items()},
        "took_s": round(time.perf_counter() - began_s, 1),
    }
    config = {
        "shape": args.shape, "weights": "random", "dtype": str(dtype), "context": args.context,
        "page_tokens": args.page, "steps": args.steps, "settling": SETTLING,
    }  # fmt: skip
    header = result_header("gpu_decode", args.device)
    finish(__doc__, {**header, "config": config, **results}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--engine", type=int, nargs="*", default=[8], help="batches of the engine")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--steps", type=int, default=48, help="that count, of each batch")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure_steps(args: argparse.Namespace, decoder: Decoder) -> list[dict[str, Any]]:
    """All batches over one pool."""
    if not args.batch:
        return []
    each = -(-(args.context + SETTLING + args.steps) // args.page)
    pool = KVPool(decoder.spec, max(args.batch) * each, args.page, decoder.dtype, decoder.device)
    pool.keys.normal_()
    pool.values.normal_()
    recorded = open_recorded(decoder, pool, MODES["recorded"])
    if recorded is None:
        print("steps cannot be recorded on this machine: plain ones alone")
    tables = [range(i * each, (i + 1) * each) for i in range(max(args.batch))]
    found = []
    for batch in args.batch:
        kvs = [PagedKV(pool, list(table)) for table in tables[:batch]]
        found.append(Steps(args, decoder, recorded, kvs).measure())
        print(found[-1], flush=True)
    return found


class Steps:
    """One batch, both modes in turn at every step."""

    def __init__(
        self,
        args: argparse.Namespace,
        decoder: Decoder,
        recorded: RecordedDecode | None,
        kvs: list[PagedKV],
    ) -> None:
        self._args, self._decoder, self._recorded, self._kvs = args, decoder, recorded, kvs

    @torch.inference_mode()
    def measure(self) -> dict[str, Any]:
        args, num = self._args, len(self._kvs)
        plain_s, played_s, off, same = [], [], 0.0, 0
        tokens = torch.randint(10, self._decoder.spec.vocab_size, (num,)).tolist()
        recording_s = 0.0
        for step in range(SETTLING + args.steps):
            at = args.context + step
            rows = [
                Rows([token], [at], kv, [0]) for token, kv in zip(tokens, self._kvs, strict=True)
            ]
            started_s = time.perf_counter()
            logits = self._decoder.forward(rows)
            tokens = logits.argmax(-1).tolist()
            plain_s.append(time.perf_counter() - started_s)
            if self._recorded is None:
                continue
            started_s = time.perf_counter()
            played = self._recorded.play(rows)
            if played is None:
                assert step == 0, "steps cannot be recorded here: see the warning above"
                continue
            theirs = played.likeliest.tolist()
            played_s.append(time.perf_counter() - started_s)
            recording_s = max(recording_s, played_s[-1])
            off = max(off, float((played.logits - logits).norm() / logits.norm()))
            same += sum(a == b for a, b in zip(tokens, theirs, strict=True))
        row = {"batch": num, **self._rates("plain", plain_s[SETTLING:])}
        if played_s:
            row |= {
                **self._rates("recorded", played_s[SETTLING - 1 :]),
                "speedup": round(
                    statistics.median(plain_s[SETTLING:])
                    / statistics.median(played_s[SETTLING - 1 :]),
                    2,
                ),
                "recording_ms": round(recording_s * 1e3),  # once per size
                "logits_off": round(off, 4),  # of their norm, at most
                "same_tokens": round(same / (num * len(played_s)), 4),
            }
        return row

    def _rates(self, name: str, seconds: list[float]) -> dict[str, float]:
        step_s, num = statistics.median(seconds), len(self._kvs)
        spec, size = self._decoder.spec, self._decoder.dtype.itemsize
        heads = spec.num_heads + 2 * spec.num_kv_heads
        layer = spec.hidden_dim * (
            heads * spec.head_dim + spec.num_heads * spec.head_dim + 3 * spec.inner_dim
        )
        weights = spec.num_layers * layer + spec.hidden_dim * spec.vocab_size
        token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        read = size * (weights + num * self._args.context * token)
        return {
            f"{name}_ms": round(step_s * 1e3, 3),
            f"{name}_tokens_per_s": round(num / step_s, 1),
            f"{name}_tb_s": round(read / step_s / 1e12, 2),  # weights and KV, each read once
        }


def measure_engine(args: argparse.Namespace, decoder: Decoder, batch: int) -> dict[str, Any]:
    """Tokens per second of `batch` requests that decode together, everything included."""
    answer = 2 * SETTLING + args.steps
    each = args.context + answer + args.page
    drawn = torch.Generator().manual_seed(4)
    prompts = torch.randint(
        10, decoder.spec.vocab_size, (batch, args.context), generator=drawn
    ).tolist()
    row: dict[str, Any] = {"batch": batch}
    answers = {}
    for mode, recorded_rows in MODES.items():
        cfg = EngineConfig(
            page_tokens=args.page, pool_tokens=batch * each, max_running=batch, tree_share=0.0,
            alone_rows=8192, guess_rows=8192, recorded_rows=recorded_rows,
        )  # fmt: skip
        pool = make_pool(cfg, decoder)
        recorded = open_recorded(decoder, pool, recorded_rows)
        runner = Runner(decoder, recorded)
        with Engine(decoder, cfg, pool=pool, runner=runner) as engine:
            requests = [
                EngineRequest(tuple(ids), Sampling(max_tokens=answer), frozenset())
                for ids in prompts
            ]
            tickets = [engine.submit(request, held=True) for request in requests]
            while engine.pending_prefills():
                time.sleep(0.01)
            answers[mode], rate = decode_rate(tickets)
            row[f"{mode}_tokens_per_s"] = round(rate, 1)
            if recorded is not None:
                row["played"], row["sizes"] = recorded.num_played, recorded.sizes
        drop_memory(decoder.device)
    row["speedup"] = round(row["recorded_tokens_per_s"] / row["plain_tokens_per_s"], 2)
    pairs = zip(answers["plain"], answers["recorded"], strict=True)
    row["same_answers"] = sum(a == b for a, b in pairs)
    print("engine:", row, flush=True)
    return row


def decode_rate(tickets: list[Ticket]) -> tuple[list[list[int]], float]:
    """Release all; tokens per second while every one of them decodes, the first steps left out."""
    answers: list[list[int]] = [[] for _ in tickets]
    times: list[list[float]] = [[] for _ in tickets]

    def read(i: int) -> None:
        for choice in tickets[i]:
            times[i].append(time.perf_counter())
            answers[i].append(choice.token_id)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(tickets))]
    for thread in threads:
        thread.start()
    for ticket in tickets:
        ticket.release()
    for thread in threads:
        thread.join()
    start = max(each[2 * SETTLING - 1] for each in times)
    end = min(each[-1] for each in times)
    inside = sum(start < at <= end for each in times for at in each)
    return answers, inside / (end - start)


def drop_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
