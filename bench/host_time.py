"""How long does the host work on a fused prefill, by part, whatever the device?

64 chunks of 510 tokens, chunk KV in the host tier, brought through the ring that feeds a GPU. The
model lies on torch's `meta` device, where every operator has its shapes and no numbers: what is
left is what the host does, the same code as for a GPU. Scores need numbers, so every sixth hit is
chosen. Parts do not overlap, and some stand apart from the sum. To compare two commits, run it on
both.

    python bench/host_time.py --out bench/results/host_time-cpu.json
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from common.results import finish, result_header
from kvweave.fuse import fuse, fused_pass, prefill
from kvweave.fuse.needs import Needs
from kvweave.fuse.protocol import Prefix
from kvweave.fuse.request import ChunkSpan, PromptChunk
from kvweave.fuse.selectors import query_attention
from kvweave.fuse.selectors.query_attention import QueryAttention
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.sources import LayerTransfer
from kvweave.fuse.strategy import ModelFacts, Strategy
from kvweave.fuse.transfer import pipeline, rooms
from kvweave.fuse.transfer.pipeline import taking_order
from kvweave.fuse.transfer.ring import Ring
from kvweave.fuse.transfer.rooms import OwnRoom
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import KeyContext, make_chunk_key
from kvweave.kv.format.objects import pack_chunk
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import GIB, HostTierConfig, StoreConfig
from kvweave.model.decoder import Decoder
from kvweave.model.rope import RopeSpec
from kvweave.model.shapes import random_decoder
from kvweave.model.spec import ModelSpec

SPEC = ModelSpec(
    family="llama", num_layers=32, hidden_dim=4, inner_dim=4, num_heads=1, num_kv_heads=1,
    head_dim=2, vocab_size=30_000, max_context=131072, norm_eps=1e-5,
    rope=RopeSpec("default", 10_000.0, 2),
)  # fmt: skip
CHUNK_TOKENS, PREAMBLE, QUESTION = 510, 32, 64
MODES = (("reuse", 0.0), ("epic", 0.15), ("weave", 0.15))
META = torch.device("meta")
RING = Ring(META, 64 << 20)
# orders and arithmetic that cost a GPU little and `meta` much, and what is done while it is busy
APART = ("copies", "angles", "selector", "layers")
# what a part is called, and the function whose time it is: where it is looked up, its name there
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("name chunks", prefill, "named_kv"),
    ("lease", KVStore, "acquire"),
    ("load", KVStore, "load"),
    ("missing", prefill, "_missing"),
    ("classify", prefill, "classify"),
    ("source", pipeline, "PipelinedChunks"),
    ("copies", Ring, "copy"),
    ("placement", pipeline, "Placement"),
    ("angles", Decoder, "angles"),
    ("stitched", prefill, "Stitched"),
    ("rows", fuse, "select_rows"),
    ("fuse", prefill, "order_fusion"),
    ("selector", QueryAttention, "select"),
    ("drift", fuse, "make_mover"),
    ("head of the pass", fuse, "fused_pass"),
    ("record", prefill.StoredPrompt, "_record"),
    ("release", KVStore, "_release"),
)


class Clock:
    """Seconds by part. A part inside another is not the other's."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._within = ["the rest"]
        self._since_s = time.perf_counter()

    def enter(self, part: str) -> None:
        self._lap()
        self._within.append(part)

    def leave(self) -> None:
        self._lap()
        self._within.pop()

    def _lap(self) -> None:
        now_s = time.perf_counter()
        self.seconds[self._within[-1]] += now_s - self._since_s
        self._since_s = now_s

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            if part == "drift" and self._within[-1] == "layers":
                return call(*args, **named)  # the one behind a taper: the device is busy by then
            self.enter(part)
            try:
                return call(*args, **named)
            finally:
                self.leave()

        return run

    def turning(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Behind this call, what called it counts as another part."""

        def run(*args: Any, **named: Any) -> Any:
            answer = call(*args, **named)
            self._lap()
            self._within[-1] = part
            return answer

        return run


@contextmanager
def watching(clock: Clock) -> Iterator[None]:
    with ExitStack() as stack:
        for part, owner, name in PARTS:
            timed = clock.timed(part, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, timed))
        turned = clock.turning("layers", fused_pass.steps_of)
        stack.enter_context(patch.object(fused_pass, "steps_of", turned))
        turned = clock.turning("behind the pass", Decoder.logits)
        stack.enter_context(patch.object(Decoder, "logits", turned))
        stack.enter_context(patch.object(fused_pass, "attend", lambda q, *_, **__: q))
        stack.enter_context(patch.object(QueryAttention, "scores", lambda *_: None))
        stack.enter_context(patch.object(query_attention, "ranked_positions", every_sixth))
        stack.enter_context(patch.object(rooms, "open_source", through_ring))
        yield


@contextmanager
def through_ring(
    decoder: Decoder, placed: Sequence[ChunkSpan], layers: LayerTransfer, needs: Needs
) -> Iterator[pipeline.PipelinedChunks]:
    """As `open_source` does it for a GPU."""
    order, at_once = taking_order(needs, SPEC.num_layers), needs.probe in ("none", "full")
    ahead = pipeline.LookAhead(order, 0.0, begins=at_once)
    yield pipeline.PipelinedChunks(decoder, placed, layers, RING, ahead)
    RING.finish()


def every_sixth(
    _: Tensor, positions: Tensor, counts: Sequence[int], scoring: object
) -> list[Tensor]:
    return [positions[::6][:count].contiguous() for count in counts]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    decoder = random_decoder(SPEC, META, torch.float32)
    with KVStore(StoreConfig((HostTierConfig(GIB // 2),))) as store:
        once = long_prompt(decoder, store, args.chunks)
        modes = {name: mode_ms(once, name, ratio, args.repeats) for name, ratio in MODES}
    show(modes)
    config = {
        "chunks": args.chunks, "chunk_tokens": CHUNK_TOKENS, "preamble": PREAMBLE,
        "question": QUESTION, "layers": SPEC.num_layers, "repeats": args.repeats,
    }  # fmt: skip
    finish(__doc__, {**result_header("host_time", "cpu"), "config": config, "ms": modes}, args.out)


def long_prompt(
    decoder: Decoder, store: KVStore, num_chunks: int
) -> Callable[[Strategy, float], None]:
    """Stores the chunks of a prompt; what comes back prefills it."""
    draw = torch.Generator().manual_seed(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(SPEC.vocab_size, (count,), generator=draw).tolist())

    context = KeyContext("bench", "float32", "raw", "any", (), "any")
    shape = (2, SPEC.num_layers, CHUNK_TOKENS, SPEC.num_kv_heads, SPEC.head_dim)
    chunks = []
    for token_ids in (ids(CHUNK_TOKENS) for _ in range(num_chunks)):
        key = make_chunk_key(context, token_ids)
        chunks.append(PromptChunk(token_ids, key, key))
        store.save(pack_chunk(key, [LayerKV(*each) for each in torch.zeros(shape).unbind(1)]))
    front = [LayerKV(*torch.empty(2, PREAMBLE, *shape[3:], device=META)) for _ in range(shape[1])]
    preamble, question = Prefix(ids(PREAMBLE), tuple(front)), ids(QUESTION)
    kv = decoder.new_kv(PREAMBLE + num_chunks * CHUNK_TOKENS + QUESTION)
    frame = prefill.PromptFrame(preamble, question)

    def once(strategy: Strategy, ratio: float) -> None:
        with prefill.StoredPrompt(SPEC.num_layers, chunks, store, strategy) as stored:
            stored.prefill(decoder, frame, OwnRoom(kv), ratio)

    return once


def mode_ms(
    once: Callable[[Strategy, float], object], name: str, ratio: float, repeats: int
) -> dict[str, float]:
    """Median milliseconds of each part, and the sum of those that do not stand apart."""
    strategy = open_strategy(name, ModelFacts(SPEC.num_layers))
    seen: list[Counter[str]] = []
    for _ in range(1 + repeats):
        clock = Clock()
        with watching(clock):
            clock.timed("between", once)(strategy, ratio)
        seen.append(clock.seconds)
    parts = [*(name for name, *_ in PARTS), "layers", "behind the pass", "between"]
    found = {p: round(statistics.median(s[p] for s in seen[1:]) * 1e3, 3) for p in parts}
    return {**found, "host": round(sum(v for p, v in found.items() if p not in APART), 3)}


def show(modes: dict[str, dict[str, float]]) -> None:
    table = Table("host ms", *modes)
    parts = list(next(iter(modes.values())))
    for part in sorted(parts, key=lambda part: part in APART):
        name = f"({part})" if part in APART else part
        table.add_row(name, *(f"{found[part]:.2f}" for found in modes.values()))
    Console().print(table)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
