"""Attention over own pages and shared chunks on a GPU, against its definition and dense prompts.

Needs bare PyTorch with Triton and a CUDA device: `pytest -m gpu tests/gpu`. Without a device the
kernels run in Triton's interpreter (TRITON_INTERPRET=1).
"""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton comes with CUDA builds of PyTorch")

from kvweave.kernels.gpu import segments as on_gpu
from kvweave.kernels.gpu.segment_plan import Room
from kvweave.kernels.gpu.segment_tables import SegmentShape, SegmentTables
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.segments import attend_segments_reference
from kvweave.kernels.types import SegmentedRows
from worlds.segments import Heads, SegmentWorld, random_world

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
NEAR = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def pages_of(world: SegmentWorld, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return world.key_pages.to(DEVICE, dtype), world.value_pages.to(DEVICE, dtype)


def compare(
    world: SegmentWorld, wanted: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32
) -> None:
    """The kernels, the definition on the same rounded numbers, and dense prompts in float64."""
    at, ranks, rows = world.batch(wanted)
    q = world.queries(at)
    pages = pages_of(world, dtype)

    def turn(positions: Tensor) -> Angles:
        return Angles(*(x.float() for x in world.turn(positions)))

    ours = on_gpu.attend_segments(q.to(DEVICE, dtype), at, ranks, rows, *pages, turn).double().cpu()
    wide = pages[0].double().cpu(), pages[1].double().cpu()
    rounded = attend_segments_reference(q.to(dtype).double(), at, ranks, rows, *wide, world.turn)
    dense = world.dense(q, at, rows)
    assert bool(ours.isfinite().all()), "something was read that nobody wrote"
    for name, theirs in (("definition", rounded), ("dense", dense)):
        off = float((ours - theirs).norm() / theirs.norm())
        assert off < NEAR[dtype], f"off by {off:.2g} from the {name}"


@pytest.mark.parametrize("seed", range(8 if ON_GPU else 3))
@pytest.mark.parametrize("page", [4, 16] if ON_GPU else [16])
@pytest.mark.parametrize("shifted", [0.0, 0.7])
def test_some_rows_of_each_prompt(seed: int, page: int, shifted: float) -> None:
    """Of the front, inside chunks, behind them."""
    rng = random.Random(seed)
    world = random_world(seed, Heads(rotary=16 if seed % 2 else 8), page, shifted)
    compare(
        world,
        [sorted(rng.sample(p.own_positions, min(6, len(p.own_positions)))) for p in world.prompts],
    )


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


@pytest.mark.parametrize(("ratio", "shifted"), [(0.0, 0.0), (0.15, 0.0), (0.15, 0.7), (0.6, 1.0)])
@pytest.mark.parametrize("num", [1, 2, 17, 40] if ON_GPU else [3])
def test_a_decode_step_reads_shared_chunks_once(num: int, ratio: float, shifted: float) -> None:
    world = make_batch(Heads(), 16, num, 70, ratio, shifted)
    compare(world, world.last_rows())


@pytest.mark.parametrize("num", [1, 3])
def test_rows_that_hold_no_chunk_look_at_their_own_pages(num: int) -> None:
    """It was an illegal access: the tables of such a batch had no address to find own pages by."""
    world = SegmentWorld(Heads(), 16, seed=num)
    for i in range(num):
        world.add_prompt([], front=40 + i, behind=9)
    compare(world, world.last_rows())
    compare(world, [prompt.own_positions[-9:] for prompt in world.prompts])


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
    [Heads(32, 8, 128, 128), Heads(28, 4, 128, 128), Heads(9, 3, 64, 64), Heads(8, 8, 64, 32)],
)
@pytest.mark.parametrize("shifted", [0.0, 0.8])
def test_shapes_of_real_models(dtype: torch.dtype, page: int, heads: Heads, shifted: float) -> None:
    world = make_batch(heads, page, 6, 300, 0.15, shifted)
    compare(world, world.last_rows(), dtype)


@pytest.mark.skipif(not ON_GPU, reason="too much for the interpreter")
@pytest.mark.parametrize("dim", [80, 256])
@pytest.mark.parametrize("shifted", [0.0, 0.8])
def test_heads_of_other_sizes(dim: int, shifted: float) -> None:
    world = make_batch(Heads(4, 2, dim, dim), 16, 5, 100, 0.3, shifted)
    compare(world, world.last_rows(), torch.bfloat16)


class Steps:
    """Tables with room to spare, as a recording has them."""

    def __init__(self, world: SegmentWorld, num_rows: int) -> None:
        heads = world.heads
        shape = SegmentShape(heads.num, heads.kv, heads.dim, world.page, torch.float32)
        is_shifted = any(c.shift is not None for p in world.prompts for c in p.chunks)
        shape = shape._replace(shifted=is_shifted)
        self.world = world
        self.tables = SegmentTables(num_rows, Room(400, 900, 900, 900, 900), shape, DEVICE, 2)
        self.pages = pages_of(world, torch.float32)
        self.q = torch.zeros(num_rows, heads.num, heads.dim, device=DEVICE)

    def send(self, positions: Tensor, ranks: Tensor, rows: Sequence[SegmentedRows]) -> Tensor:
        """What one step changes; the answers it must give."""
        q = self.world.queries(positions)
        self.q[: len(q)] = q.to(DEVICE, torch.float32)
        assert self.tables.hold([each.chunks for each in rows])
        own_keys = [rank + 1 for rank in ranks.tolist()]
        numbers = torch.arange(2 * self.tables.num_rows).view(2, -1).numpy()
        self.tables.update(own_keys, [each.own.page_table for each in rows], numbers)
        return attend_segments_reference(
            q, positions, ranks, rows, self.world.key_pages, self.world.value_pages, self.world.turn
        )

    def attend(self) -> Tensor:
        step = on_gpu.begin_step(self.tables, self.world.turn)
        return on_gpu.attend_tables(self.q, self.tables, step, *self.pages)


@pytest.mark.parametrize("shifted", [0.0, 0.7])
def test_tables_are_written_again_for_other_rows_and_lengths(shifted: float) -> None:
    """One graph answers for batches that grow, come and go; absent rows come out as zero."""
    world = make_batch(Heads(), 16, 6, 40, 0.2, shifted)
    steps = Steps(world, 8)
    graph = None
    for step in range(9 if ON_GPU else 4):
        rng = random.Random(step)
        num = rng.randint(1, 6)
        world_rows = [p.own_positions[-1 - step % 3 :][:1] for p in world.prompts]
        at, ranks, rows = world.batch(world_rows)
        who = rng.sample(range(6), num)
        chosen = [rows[i]._replace(start=n, end=n + 1) for n, i in enumerate(who)]
        wanted = steps.send(at[who], ranks[who], chosen)
        if ON_GPU and graph is None:
            out = steps.attend()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = steps.attend()
        if graph is None:
            out = steps.attend()
        else:
            graph.replay()
        torch.testing.assert_close(out[:num].cpu().double(), wanted, atol=1e-5, rtol=1e-4)
        assert not bool(out[num:].any()), "rows of absent sequences are zero"
        assert steps.tables.rows.flatten().tolist() == list(range(16))


def test_chunks_without_room_are_refused_and_nothing_changes() -> None:
    world = make_batch(Heads(), 16, 3, 40, 0.2)
    at, ranks, rows = world.batch(world.last_rows())
    steps = Steps(world, 4)
    wanted = steps.send(at, ranks, rows)
    many = tuple(rows[0].chunks) * 200
    assert not steps.tables.hold([many])
    out = steps.attend()
    torch.testing.assert_close(out[:3].cpu().double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shifted", [0.0, 1.0])
def test_queries_are_turned_to_their_places_on_the_way(shifted: float) -> None:
    world = make_batch(Heads(rotary=8), 16, 3, 40, 0.2, shifted)
    at, ranks, rows = world.batch(world.last_rows())
    steps = Steps(world, 3)
    wanted = steps.send(at, ranks, rows)
    place = world.turn(at.to(DEVICE))
    unturned = rotate(steps.q.double(), Angles(place.cos, -place.sin)).float()
    step = on_gpu.begin_step(steps.tables, world.turn)
    by = Angles(place.cos.float(), place.sin.float())
    out = on_gpu.attend_tables(unturned, steps.tables, step, *steps.pages, by)
    torch.testing.assert_close(out.cpu().double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not ON_GPU, reason="graphs are CUDA's")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_attention_by_host_ranks_refuses_to_be_recorded() -> None:
    world = make_batch(Heads(), 16, 2, 40, 0.2)
    at, ranks, rows = world.batch(world.last_rows())
    q = world.queries(at).to(DEVICE, torch.float32)
    pages = pages_of(world, torch.float32)
    on_gpu.attend_segments(q, at, ranks, rows, *pages, world.turn)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="attend_tables"), torch.cuda.graph(graph):
        on_gpu.attend_segments(q, at, ranks, rows, *pages, world.turn)
