"""Shared chunks in 8 bits on a GPU: codes, rows laid from them and attention over them, each
against its definition; requests over them against copies and against a CPU.

Needs bare PyTorch with Triton and a CUDA device: `pytest -m gpu tests/gpu`. Without a device the
kernels run in Triton's interpreter (TRITON_INTERPRET=1).
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton comes with CUDA builds of PyTorch")

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest
from kvweave.kernels.coded import codes_of, encode_rows_reference, relocate_coded_reference
from kvweave.kernels.gpu import coded as rows_on_gpu
from kvweave.kernels.gpu import segments as on_gpu
from kvweave.kernels.gpu.segment_plan import Room
from kvweave.kernels.gpu.segment_tables import SegmentShape, SegmentTables
from kvweave.kernels.rope import Angles, make_angles
from kvweave.kernels.segments import attend_segments_reference
from kvweave.kernels.types import CodedPages, RowMoves
from kvweave.model.load import load_decoder
from worlds.engine import SMALL, plain
from worlds.fused import CHUNKS, World, answer, at_rest
from worlds.segments import Heads, SegmentWorld, random_world
from worlds.tiny_models import make_model_folder

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
NEAR = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CODED = replace(SMALL, share_chunks=True, shared_codec="int8")
LONG = [CHUNKS[2], CHUNKS[0], CHUNKS[3], CHUNKS[2], CHUNKS[1]]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def moved(coded: CodedPages, device: torch.device) -> CodedPages:
    return CodedPages(*(None if x is None else x.to(device) for x in coded))


def lift_of(heads: int, dim: int, half: int) -> Tensor:
    drawn = torch.rand(heads, dim) * 5 + 1
    return torch.cat((drawn[:, :half], drawn[:, :half], drawn[:, 2 * half :]), dim=-1)


def empty_pages(pages: int, page: int, heads: int, dim: int, lift: Tensor | None) -> CodedPages:
    keys, values = torch.zeros(2, pages, page, heads, dim // 2, dtype=torch.int16)
    scales = torch.zeros(pages, heads, page, 2, dtype=torch.float16)
    return CodedPages(keys, values, scales, lift)


@pytest.mark.parametrize("lifted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8, 128, 64), (2, 64, 32), (3, 80, 20), (3, 80, 40)])
def test_rows_are_coded_and_laid_as_the_definitions_say(
    dtype: torch.dtype, shape: tuple[int, int, int], lifted: bool
) -> None:
    heads, dim, half = shape
    torch.manual_seed(0)
    keys, values = torch.randn(2, 100, heads, dim).to(dtype)
    values[5] = 0.0
    slots = torch.randperm(20 * 16)[:100]
    wanted = empty_pages(20, 16, heads, dim, lift_of(heads, dim, half) if lifted else None)
    found = moved(wanted, DEVICE)
    found = CodedPages(*(None if x is None else x.clone() for x in found))
    encode_rows_reference(keys, values, slots, wanted)
    rows_on_gpu.encode_rows(keys.to(DEVICE), values.to(DEVICE), slots.to(DEVICE), found)
    for mine, theirs in zip(found[:2], wanted[:2], strict=True):
        apart = (codes_of(mine.cpu(), torch.int32) - codes_of(theirs, torch.int32)).abs()
        assert apart.max() <= 1, "a division may round otherwise"
        assert apart.float().mean() < 1e-3
    torch.testing.assert_close(found.scales.cpu(), wanted.scales, atol=0.0, rtol=1e-3)
    own_keys, own_values = torch.randn(2, 40, heads, dim).to(dtype)
    which = torch.cat([torch.zeros(30, dtype=torch.int64), torch.randint(1, 4, (100,))])
    moves = RowMoves(torch.cat([torch.randperm(40)[:30], slots]), torch.randperm(200)[:130], which)
    turn = make_angles(torch.tensor([0, 3, 700, 9000]), torch.rand(half), 1.0, torch.float32)
    want = torch.zeros(2, 200, heads, dim, dtype=dtype)
    relocate_coded_reference(own_keys, own_values, wanted, moves, turn, *want)
    out = torch.zeros_like(want, device=DEVICE)
    there = RowMoves(*(x.to(DEVICE) for x in moves if x is not None))
    rows_on_gpu.relocate_coded(
        own_keys.to(DEVICE), own_values.to(DEVICE), moved(wanted, DEVICE), there,
        Angles(*(x.to(DEVICE) for x in turn)), *out,
    )  # fmt: skip
    close = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu(), want, atol=close, rtol=close)


def compare(
    world: SegmentWorld,
    wanted: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
    *,
    lifted: bool = False,
) -> None:
    """The kernels, and the definition in float64 over the same codes and rounded own rows."""
    at, ranks, rows = world.batch(wanted)
    q = world.queries(at)
    coded = world.coded(dtype.itemsize, world.lift() if lifted else None)
    own = world.key_pages.to(DEVICE, dtype), world.value_pages.to(DEVICE, dtype)

    def turn(positions: Tensor) -> Angles:
        return Angles(*(x.float() for x in world.turn(positions)))

    ours = on_gpu.attend_segments(
        q.to(DEVICE, dtype), at, ranks, rows, *own, turn, moved(coded, DEVICE)
    )
    wide = own[0].double().cpu(), own[1].double().cpu()
    theirs = attend_segments_reference(
        q.to(dtype).double(), at, ranks, rows, *wide, world.turn, coded
    )
    assert bool(ours.isfinite().all()), "something was read that nobody wrote"
    off = float((ours.double().cpu() - theirs).norm() / theirs.norm())
    assert off < NEAR[dtype], f"off by {off:.2g}"


@pytest.mark.parametrize("lifted", [False, True])
@pytest.mark.parametrize("seed", range(8 if ON_GPU else 3))
@pytest.mark.parametrize("page", [4, 16] if ON_GPU else [16])
@pytest.mark.parametrize("shifted", [0.0, 0.7])
def test_some_rows_of_each_prompt(seed: int, page: int, lifted: bool, shifted: float) -> None:
    """Of the front, inside chunks, behind them."""
    rng = random.Random(seed)
    world = random_world(seed, Heads(rotary=16 if seed % 2 else 8), page, shifted)
    rows = [
        sorted(rng.sample(p.own_positions, min(6, len(p.own_positions)))) for p in world.prompts
    ]
    compare(world, rows, lifted=lifted)


def make_batch(
    heads: Heads, page: int, num: int, size: int, ratio: float, shifted: float = 0.0
) -> SegmentWorld:
    """Prompts that share all chunks but one, at different places."""
    world = SegmentWorld(heads, page, seed=num, num_pages=max(64, 40 * num * size // page))
    shared = [world.add_chunk(size), world.add_chunk(size // 2 + 1), world.add_chunk(size + 3)]
    for i in range(num):
        held = [*random.Random(i).sample(shared, 3), world.add_chunk(size)]
        world.add_prompt(held, front=1 + i % 5, behind=3 + i, ratio=ratio, shifted=shifted)
    return world


@pytest.mark.parametrize(("ratio", "shifted"), [(0.0, 0.0), (0.15, 0.7), (0.6, 0.0), (0.6, 1.0)])
@pytest.mark.parametrize("num", [1, 2, 17, 40] if ON_GPU else [3])
def test_a_decode_step_reads_shared_codes_once(num: int, ratio: float, shifted: float) -> None:
    world = make_batch(Heads(), 16, num, 70, ratio, shifted)
    compare(world, world.last_rows())


@pytest.mark.skipif(not ON_GPU, reason="too much for the interpreter")
@pytest.mark.parametrize(
    ("dtype", "page"),
    [
        *((torch.bfloat16, 16), (torch.bfloat16, 32), (torch.bfloat16, 64), (torch.bfloat16, 128)),
        *((torch.float16, 64), (torch.float32, 32)),
    ],
)
@pytest.mark.parametrize(
    "heads",
    [
        *(Heads(32, 8, 128, 128), Heads(28, 4, 128, 128), Heads(9, 3, 64, 64)),
        *(Heads(8, 8, 64, 32), Heads(4, 2, 80, 80)),
    ],
)
@pytest.mark.parametrize("shifted", [0.0, 0.8])
def test_shapes_of_real_models(dtype: torch.dtype, page: int, heads: Heads, shifted: float) -> None:
    world = make_batch(heads, page, 6, 300, 0.15, shifted)
    compare(world, world.last_rows(), dtype, lifted=heads.num == 28)


@pytest.mark.parametrize("shifted", [0.0, 0.7])
def test_tables_of_codes_are_written_again_for_other_rows(shifted: float) -> None:
    """One graph answers for batches that grow, come and go; absent rows come out as zero."""
    world = make_batch(Heads(), 16, 6, 40, 0.2, shifted)
    heads = world.heads
    host = world.coded(4, world.lift())
    own = world.key_pages.to(DEVICE, torch.float32), world.value_pages.to(DEVICE, torch.float32)
    is_shifted = shifted > 0
    shape = SegmentShape(heads.num, heads.kv, heads.dim, 16, torch.float32, True, is_shifted)
    tables = SegmentTables(8, Room(400, 900, 900, 900, 900), shape, DEVICE, 2)
    coded = moved(host, DEVICE)
    q = torch.zeros(8, heads.num, heads.dim, device=DEVICE)

    def attend() -> Tensor:
        step = on_gpu.begin_step(tables, world.turn)
        return on_gpu.attend_tables(q, tables, step, *own, None, coded)

    graph = None
    for turn in range(6 if ON_GPU else 3):
        rng = random.Random(turn)
        at, ranks, rows = world.batch([p.own_positions[-1 - turn % 3 :][:1] for p in world.prompts])
        who = rng.sample(range(6), rng.randint(1, 6))
        chosen = [rows[i]._replace(start=n, end=n + 1) for n, i in enumerate(who)]
        queries = world.queries(at[who])
        q[: len(who)] = queries.to(DEVICE, torch.float32)
        assert tables.hold([each.chunks for each in chosen])
        keys = [rank + 1 for rank in ranks[who].tolist()]
        tables.update(keys, [each.own.page_table for each in chosen])
        wanted = attend_segments_reference(
            queries, at[who], ranks[who], chosen, world.key_pages, world.value_pages, world.turn,
            host,
        )  # fmt: skip
        if ON_GPU and graph is None:
            out = attend()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = attend()
        if graph is None:
            out = attend()
        else:
            graph.replay()
        torch.testing.assert_close(out[: len(who)].cpu().double(), wanted, atol=1e-4, rtol=1e-3)
        assert not bool(out[len(who) :].any()), "rows of absent sequences are zero"


def thoughts(world: World, cfg: EngineConfig, requests: list[EngineRequest]) -> list[Tensor]:
    """What the model thought of each answer's tokens, all asked at once and once more."""
    with Engine(world.decoder, cfg) as engine:
        for _ in range(2):
            tickets = [engine.submit(request) for request in requests]
            for ticket in tickets:
                answer(ticket)
        at_rest(engine, world)
        return [torch.stack(ticket.distributions).exp().cpu() for ticket in tickets]


@pytest.mark.skipif(not ON_GPU, reason="whole requests")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["llama", "qwen2-yarn", "qwen3"])
@pytest.mark.parametrize("recorded", [0, 64])
def test_requests_over_codes_are_near_copies_and_what_a_cpu_gives(
    tmp_path: Path, variant: str, dtype: str, recorded: int
) -> None:
    """In a mixed batch; steps played and not. Codes of a GPU and of a CPU are the same but for the
    rounding of a division."""
    folder = make_model_folder(tmp_path, variant, max_position_embeddings=512, head_dim=64)
    found = {}
    for device in ("cuda", "cpu"):
        world = World(load_decoder(folder, device=device, dtype=dtype), tmp_path / device)
        requests = []
        for ratio in (0.0, 0.15, 0.5, 1.0):
            request = world.request(LONG, "epic" if ratio else "reuse", ratio)
            requests.append(replace(request, forced=tuple(range(3, 11)), watched=8))
        requests.append(replace(plain(range(1, 40), max_tokens=8), forced=(3,) * 8, watched=8))
        cfg = replace(CODED, recorded_rows=recorded)
        found[device] = thoughts(world, cfg, requests)
        if device == "cuda":
            raw = replace(cfg, share_chunks=False, shared_codec="raw")
            found["copied"] = thoughts(world, raw, requests)
        world.store.close()
    for theirs, close in (("copied", 0.1), ("cpu", 0.02)):
        most = close if dtype == "float32" else 0.3
        for mine, other in zip(found["cuda"], found[theirs], strict=True):
            assert (mine - other).abs().max() < most
            assert (mine - other).abs().mean() < most / 50
