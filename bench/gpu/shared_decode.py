"""How fast is a decode step whose sequences share chunks, against one in which each has a copy?

Sequences of 8K: own rows at both ends, chunks between them in an order of their own; a share of the
chunks is held by all, the rest by one sequence each; at ratio 0.15 that share of every sequence's
chunk rows is its own, and it may see the others shifted (`kernels/shift.py`). Everything random.
`kernels`: attention of one layer from a CUDA graph of several layers, turning of queries included,
beside what reading each key and value once would take at the bandwidth of a large copy. `steps`:
whole recorded steps of the decoder, tables included. Chunks lie as own rows do, or in 8 bits
(`--pages int8`); copies are never in 8 bits.

    python bench/gpu/shared_decode.py --out bench/results/gpu_shared-h200.json
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch
from torch import Tensor

from common.results import finish, result_header, versions
from kvweave.kernels.rope import Angles, make_angles, rotate
from kvweave.kernels.segments import attend_segments_reference
from kvweave.kernels.types import CodedPages, PagedSegment, SegmentedRows, SharedChunk
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import SCALE, KVPool, PagedKV
from kvweave.model.recorded_decode import RecordedDecode
from kvweave.model.rows import Rows
from kvweave.model.shapes import SHAPES, random_decoder

SEQUENCES, CONTEXT = 32, 8192
SHARED = (0.0, 0.5, 0.9)  # of the chunks
RATIOS = ((0.0, False), (0.15, False), (0.15, True))  # of replaced rows; are the others shifted
CUTS = ((20, 400), (30, 256))  # chunks of a prompt, tokens of a chunk
LAYERS = 6  # of a graph: together far more than a cache holds
SETTLING, STEPS = 6, 24


class Heads(NamedTuple):
    """What attention knows of a model."""

    num: int
    kv: int
    dim: int


OTHERS = {  # heads and page sizes, beside the decoder's own with pages of 64
    "llama-3.1-8b, mistral-7b": [(Heads(32, 8, 128), page) for page in (16, 32, 128)],
    "qwen2.5-7b": [(Heads(28, 4, 128), 64)],
    "head dim 64": [(Heads(32, 8, 64), 64)],
}


@dataclass
class Prompts:
    """Sequences in pages of one pool."""

    own_keys: list[int]  # of each sequence, the row that decodes included
    own_pages: list[list[int]]
    own_positions: list[list[int]]
    chunks: list[tuple[SharedChunk, ...]]
    num_pages: int
    own_tokens: int  # own rows that a step must read
    chunk_tokens: int  # and rows of chunks, each once


def draw(
    cut: tuple[int, int], shared: float, ratio: float, page: int, *, shifted: bool, coded: bool
) -> Prompts:
    """`shared` of the chunks are held by all sequences, `ratio` of their rows are replaced."""
    num_chunks, chunk_tokens = cut
    rng, drawn = random.Random(1), torch.Generator().manual_seed(1)
    common, each = round(shared * num_chunks), -(-chunk_tokens // (page * (2 if coded else 1)))
    edge = CONTEXT - num_chunks * chunk_tokens
    bank = common + SEQUENCES * (num_chunks - common)
    taken = bank * each
    own_keys, own_pages, own_positions, chunks = [], [], [], []
    shifts = []  # the first page of each sequence's
    read = common * chunk_tokens
    for sequence in range(SEQUENCES):
        first = common + sequence * (num_chunks - common)
        numbers = [*range(common), *range(first, first + num_chunks - common)]
        rng.shuffle(numbers)
        held, at = [], edge // 2
        own = list(range(at))
        for number in numbers:
            gone = torch.rand(chunk_tokens, generator=drawn) < ratio
            pages = list(range(number * each, (number + 1) * each))
            held.append(SharedChunk(pages, chunk_tokens, at, gone if ratio else None))
            own += (at + gone.nonzero().flatten()).tolist()
            read += 0 if number < common else chunk_tokens - int(gone.sum())
            at += chunk_tokens
        own += range(at, CONTEXT)
        room = -(-(len(own) + SETTLING + STEPS) // page)
        own_keys.append(len(own))
        own_pages.append(list(range(taken, taken + room)))
        own_positions.append(own)
        chunks.append(tuple(held))
        taken += room
        if shifted:
            shifts.append(taken)
            taken += -(-num_chunks // page)
    mixed = rng.sample(range(taken), taken)  # nothing lies side by side
    named = {c.pages[0]: [mixed[p] for p in c.pages] for each in chunks for c in each}
    for i, first in enumerate(shifts):
        chunks[i] = tuple(
            chunk._replace(shift=mixed[first + n // page] * page + n % page)
            for n, chunk in enumerate(chunks[i])
        )
    return Prompts(
        own_keys,
        [[mixed[p] for p in table] for table in own_pages],
        own_positions,
        [tuple(c._replace(pages=named[c.pages[0]]) for c in each) for each in chunks],
        taken,
        sum(own_keys),
        read,
    )


# ---- attention of one layer


class Layers:
    """Random keys, values and queries of a few layers, and a way to turn them."""

    def __init__(self, heads: Heads, page: int, num_pages: int, *, coded: bool = False) -> None:
        self.heads, self.page, self.device = heads, page, torch.device("cuda")
        self.dtype = torch.bfloat16
        shape = (LAYERS, num_pages, page, heads.kv, heads.dim)
        self.keys, self.values = (
            torch.empty(shape, dtype=self.dtype, device=self.device).normal_() for _ in range(2)
        )
        self.coded: list[CodedPages | None] = [
            self._codes(num_pages) if coded else None for _ in range(LAYERS)
        ]
        queries = (LAYERS, SEQUENCES, heads.num, heads.dim)
        self.q = torch.empty(queries, dtype=self.dtype, device=self.device).normal_()
        half = heads.dim // 2
        self._inv_freq = 500_000.0 ** -(torch.arange(half, device=self.device) / half)
        last = torch.full((SEQUENCES,), CONTEXT - 1, device=self.device)
        self.at = make_angles(last, self._inv_freq, 1.0, self.dtype)

    def _codes(self, num_pages: int) -> CodedPages:
        """Beside the pages, not in them: what random bits would be as codes is nothing to time."""
        heads, on = self.heads, self.device
        shape = (num_pages, 2 * self.page, heads.kv, heads.dim)
        keys, values = (
            torch.randint(-127, 128, shape, dtype=torch.int8, device=on).view(torch.int16)
            for _ in range(2)
        )
        scales = (num_pages, heads.kv, 2 * self.page, 2)
        return CodedPages(keys, values, torch.full(scales, 0.02, dtype=SCALE, device=on), None)

    def turn(self, positions: Tensor) -> Angles:
        return make_angles(positions, self._inv_freq, 1.0, torch.float32)


def copied_us(heads: Heads, page: int) -> float:
    """Today's: every sequence has all of its keys in pages of its own."""
    from kvweave.kernels.gpu.decode import DecodeTables, attend_decode

    each = -(-CONTEXT // page)
    layers = Layers(heads, page, SEQUENCES * each)
    tables = DecodeTables(
        SEQUENCES, each, num_heads=heads.num, num_kv_heads=heads.kv, head_dim=heads.dim,
        dtype=layers.dtype, device=layers.device,
    )  # fmt: skip
    mixed = random.Random(2).sample(range(SEQUENCES * each), SEQUENCES * each)
    tables.update(
        [CONTEXT] * SEQUENCES, [mixed[i * each : (i + 1) * each] for i in range(SEQUENCES)]
    )
    return layer_us(
        lambda i: attend_decode(
            rotate(layers.q[i], layers.at), tables, layers.keys[i], layers.values[i]
        )
    )


def shared_row(heads: Heads, page: int, prompts: Prompts, *, coded: bool) -> dict[str, Any]:
    """One copy of every chunk: microseconds of a layer, and how far off the definition it is."""
    from kvweave.kernels.gpu.segment_tables import SegmentShape, SegmentTables, room_for_rows
    from kvweave.kernels.gpu.segments import attend_tables, begin_step

    layers = Layers(heads, page, prompts.num_pages, coded=coded)
    is_shifted = prompts.chunks[0][0].shift is not None
    shape = SegmentShape(heads.num, heads.kv, heads.dim, page, layers.dtype, coded, is_shifted)
    room = room_for_rows(SEQUENCES, 4 * CONTEXT, 64 * SEQUENCES, prompts.num_pages, shape)
    tables = SegmentTables(SEQUENCES, room, shape, layers.device)
    assert tables.hold(prompts.chunks), "tables have room for these"
    tables.update(prompts.own_keys, prompts.own_pages)
    step = begin_step(tables, layers.turn)

    def attend(i: int) -> Tensor:
        pages = layers.keys[i], layers.values[i]
        return attend_tables(layers.q[i], tables, step, *pages, layers.at, layers.coded[i])

    took_us = layer_us(attend)
    rows = [
        SegmentedRows(i, i + 1, PagedSegment(i, i + 1, own), chunks)
        for i, (own, chunks) in enumerate(zip(prompts.own_pages, prompts.chunks, strict=True))
    ]
    wanted = attend_segments_reference(
        rotate(layers.q[0], layers.at).float(), torch.full((SEQUENCES,), CONTEXT - 1),
        torch.tensor(prompts.own_keys) - 1, rows, layers.keys[0].float(), layers.values[0].float(),
        layers.turn, layers.coded[0],
    )  # fmt: skip
    off = float((attend(0).float() - wanted).norm() / wanted.norm())
    assert off < 0.01, f"shared chunks are off by {off:.3f}"
    return {"shared_us": round(took_us, 1), "off": round(off, 5)}


def layer_us(attend: Callable[[int], Tensor]) -> float:
    """Microseconds of one layer, of a graph of LAYERS; median of 15."""
    for i in range(LAYERS):
        attend(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [attend(i) for i in range(LAYERS)]
    took = []
    for _ in range(18):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) * 1e3 / LAYERS)
    assert all(bool(each.isfinite().all()) for each in kept)
    return statistics.median(took[3:])


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    source = torch.randint(0, 100, (1 << 29,), dtype=torch.int32, device="cuda")
    target, took = torch.empty_like(source), []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(took[2:])


def measure_kernels(
    name: str, heads: Heads, page: int, bandwidth: float, *, coded: bool
) -> list[dict[str, Any]]:
    copied, rows = copied_us(heads, page), []
    torch.cuda.empty_cache()
    for cut in CUTS:
        for shared in SHARED:
            for ratio, shifted in RATIOS:
                prompts = draw(cut, shared, ratio, page, shifted=shifted, coded=coded)
                found = shared_row(heads, page, prompts, coded=coded)
                raw_bytes = 4 * heads.dim  # of keys and values of a token and head
                chunk_bytes = 2 * (heads.dim + SCALE.itemsize) if coded else raw_bytes
                read = prompts.own_tokens * raw_bytes + prompts.chunk_tokens * chunk_bytes
                read *= heads.kv
                rows.append(
                    {
                        "shape": name, "heads": list(heads), "page": page,
                        "chunk_tokens": cut[1], "shared": shared, "ratio": ratio,
                        "shifted": shifted, "copied_us": round(copied, 1), **found,
                        "times": round(copied / found["shared_us"], 2),
                        "read_mb": round(read / 1e6, 1),
                        "limit_us": round(read / bandwidth * 1e6, 1),
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
                torch.cuda.empty_cache()
    return rows


# ---- whole steps


@torch.inference_mode()
def measure_steps(decoder: Decoder, page: int, *, coded: bool) -> list[dict[str, Any]]:
    """Recorded steps: every sequence with a copy of its own, and with shared chunks."""
    cases = [
        (shared, ratio, shifted, draw(CUTS[0], shared, ratio, page, shifted=shifted, coded=coded))
        for shared in SHARED
        for ratio, shifted in RATIOS
    ]
    each = -(-(CONTEXT + SETTLING + STEPS) // page)
    num_pages = max(SEQUENCES * each, *(prompts.num_pages for *_, prompts in cases))
    pool = KVPool(decoder.spec, num_pages, page, decoder.dtype, decoder.device, codes_chunks=coded)
    for layer in range(decoder.spec.num_layers):
        pool.keys[layer].normal_()
        pool.values[layer].normal_()
        if (codes := pool.codes(layer)) is not None:
            codes.scales.fill_(0.02)
    recorded = RecordedDecode(decoder, pool, SEQUENCES)
    own = [list(range(i * each, (i + 1) * each)) for i in range(SEQUENCES)]
    copied_ms = step_ms(recorded, decoder, [PagedKV(pool, pages) for pages in own])
    rows = []
    for shared, ratio, shifted, prompts in cases:
        kvs = []
        for i in range(SEQUENCES):
            kv = PagedKV(pool, prompts.own_pages[i])
            kv.lay_out(torch.tensor(prompts.own_positions[i]).numpy(), prompts.chunks[i], CONTEXT)
            kvs.append(kv)
        ms = step_ms(recorded, decoder, kvs)
        rows.append(
            {
                "shared": shared, "ratio": ratio, "shifted": shifted,
                "copied_ms": round(copied_ms, 3), "shared_ms": round(ms, 3),
                "times": round(copied_ms / ms, 2), "tokens_per_s": round(SEQUENCES / ms * 1e3),
            }
        )  # fmt: skip
        print("step", rows[-1], flush=True)
    return rows


def step_ms(recorded: RecordedDecode, decoder: Decoder, kvs: Sequence[PagedKV]) -> float:
    """Median of played steps, tokens on the host at the end of each."""
    took, tokens = [], [7] * len(kvs)
    for step in range(SETTLING + STEPS):
        batch = [
            Rows([token], [CONTEXT + step], kv, [0]) for token, kv in zip(tokens, kvs, strict=True)
        ]
        started_s = time.perf_counter()
        played = recorded.play(batch)
        if played is None:
            assert step < 2, "steps cannot be recorded here"
            tokens = decoder.forward(batch).argmax(-1).tolist()
            continue
        tokens = played.likeliest.tolist()
        took.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(took[SETTLING - 2 :])


def measure(decoder: Decoder, *, others: bool = False, coded: bool = False) -> dict[str, Any]:
    """The decode part of bench/gpu_shared.py."""
    spec, bandwidth = decoder.spec, copy_bandwidth()
    heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    kernels = measure_kernels("the decoder's", heads, 64, bandwidth, coded=coded)
    steps = measure_steps(decoder, 64, coded=coded)
    torch.cuda.empty_cache()

    def least(
        rows: Sequence[dict[str, Any]], shared: float, ratios: Sequence[tuple[float, bool]]
    ) -> float:
        return min(
            row["times"]
            for row in rows
            if row["shared"] == shared and (row["ratio"], row["shifted"]) in ratios
        )

    found: dict[str, Any] = {
        "decode_90_shared": least(kernels, 0.9, RATIOS),
        "decode_90_shared_by_ratio": {
            f"{ratio}{', shifted' * shifted}": least(kernels, 0.9, [(ratio, shifted)])
            for ratio, shifted in RATIOS
        },
        "decode_50_shared": least(kernels, 0.5, RATIOS),
        "decode_0_shared": least(kernels, 0.0, RATIOS),
        "step_90_shared": least(steps, 0.9, RATIOS),
        "step_0_shared": least(steps, 0.0, RATIOS),
        "copy_tb_s": round(bandwidth / 1e12, 2),
        "decode": kernels,
        "decode_steps": steps,
    }
    if others:
        found["decode_shapes"] = [
            row
            for name, shapes in OTHERS.items()
            for each in shapes
            for row in measure_kernels(name, *each, bandwidth, coded=coded)
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--pages", choices=("raw", "int8"), default="raw", help="of shared chunks")
    parser.add_argument("--others", action="store_true", help="other shapes and page sizes too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import gpu_shared
    from common.gpu_world import STACK

    decoder = random_decoder(SHAPES[args.shape], torch.device(args.device), torch.bfloat16)
    result = {
        **result_header("gpu_shared", args.device), "versions": versions(*STACK),
        "config": {"parts": "decode", "shape": args.shape, "sequences": SEQUENCES,
                   "context": CONTEXT, "dtype": "torch.bfloat16", "pages": args.pages},
        **measure(decoder, others=args.others, coded=args.pages == "int8"),
    }  # fmt: skip
    finish(gpu_shared.__doc__, result, args.out)


if __name__ == "__main__":
    main()
