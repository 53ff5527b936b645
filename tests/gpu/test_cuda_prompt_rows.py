"""Rows of one prompt over chunks that lie ready, on a GPU, against the definition.

Needs bare PyTorch with Triton and a CUDA device: `pytest -m gpu tests/gpu`. Without a device the
kernels run in Triton's interpreter (TRITON_INTERPRET=1).
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton comes with CUDA builds of PyTorch")

from kvweave.kernels.gpu.prompt_rows import (
    MOST_CHUNKS,
    PromptTables,
    attend_prompt_rows,
    turned_back,
)
from kvweave.kernels.gpu.segment_tables import SegmentShape
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.segments import attend_segments_reference
from kvweave.kernels.types import CodedPages
from worlds.segments import Heads, SegmentWorld

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
NEAR = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def make_world(heads: Heads, page: int, sizes: list[int], front: int, behind: int) -> SegmentWorld:
    """One prompt over chunks of these sizes."""
    room = sum(-(-size // page) for size in sizes) + -(-(front + behind) // page) + 3
    world = SegmentWorld(heads, page, seed=len(sizes), num_pages=room)
    world.add_prompt([world.add_chunk(size) for size in sizes], front, behind, ratio=0.0)
    return world


class PromptSteps:
    """Tables with room to spare, as a recording has them, for prompts of one world."""

    def __init__(
        self, world: SegmentWorld, num_rows: int, dtype: torch.dtype, coded: CodedPages | None
    ) -> None:
        heads = world.heads
        shape = SegmentShape(
            heads.num, heads.kv, heads.dim, world.page, dtype, coded is not None
        )  # fmt: skip
        self.world, self.dtype, self.coded = world, dtype, coded
        self.tables = PromptTables(num_rows, world.num_pages, shape, DEVICE, 2)
        self.pages = world.key_pages.to(DEVICE, dtype), world.value_pages.to(DEVICE, dtype)
        there = None if coded is None else (None if x is None else x.to(DEVICE) for x in coded)
        self.codes = None if there is None else CodedPages(*there)
        self.q = torch.zeros(num_rows, heads.num, heads.dim, device=DEVICE, dtype=dtype)
        angles = torch.zeros(2, num_rows, 1, heads.dim // 2, device=DEVICE)
        self.at = Angles(*angles)

    def send(self, num_rows: int) -> Tensor:
        """The last rows of the prompt; the answers they must get."""
        world = self.world
        prompt = world.prompts[0]
        at, ranks, rows = world.batch([prompt.own_positions[-num_rows:]])
        place = world.turn(at)
        unturned = rotate(world.queries(at), Angles(place.cos, -place.sin))
        self.q[:num_rows] = unturned.to(DEVICE, self.dtype)
        self.at.cos[:num_rows], self.at.sin[:num_rows] = (x.to(DEVICE) for x in place)
        numbers = torch.arange(2 * len(self.q)).numpy()
        keys = [rank + 1 for rank in ranks.tolist()]
        assert self.tables.update(rows[0].chunks, keys, rows[0].own.page_table, numbers)
        wide = self.pages[0].double().cpu(), self.pages[1].double().cpu()
        turned = rotate(self.q[:num_rows].double().cpu(), place).to(self.dtype).double()
        return attend_segments_reference(turned, at, ranks, rows, *wide, world.turn, self.coded)

    def attend(self) -> Tensor:
        def turn(positions: Tensor) -> Angles:
            return Angles(*(x.float() for x in self.world.turn(positions)))

        back = turned_back(self.tables, turn)
        return attend_prompt_rows(self.q, self.tables, self.at, back, *self.pages, self.codes)


def compare(
    world: SegmentWorld,
    num_rows: int,
    dtype: torch.dtype = torch.float32,
    *,
    coded: CodedPages | None = None,
) -> None:
    steps = PromptSteps(world, num_rows + 3, dtype, coded)
    wanted = steps.send(num_rows)
    ours = steps.attend()[:num_rows].double().cpu()
    assert bool(ours.isfinite().all()), "something was read that nobody wrote"
    off = float((ours - wanted).norm() / wanted.norm())
    assert off < NEAR[dtype], f"off by {off:.2g}"
    assert steps.tables.rows.flatten().tolist() == list(range(2 * len(steps.q)))


@pytest.mark.parametrize("coded", ["raw", "int8", "lifted"])
@pytest.mark.parametrize(
    ("sizes", "num_rows"),
    [([40, 7, 64], 5), ([1], 2), ([33] * 9, 20), ([130, 70], 9)] if ON_GPU else [([40, 7], 5)],
)
def test_rows_see_all_chunks_and_their_own_pages(
    sizes: list[int], num_rows: int, coded: str
) -> None:
    world = make_world(Heads(), 16, sizes, front=3, behind=num_rows + 2)
    codes = world.coded(4, world.lift() if coded == "lifted" else None) if coded != "raw" else None
    compare(world, num_rows, coded=codes)


@pytest.mark.skipif(not ON_GPU, reason="too much for the interpreter")
@pytest.mark.parametrize("is_coded", [False, True])
@pytest.mark.parametrize(
    ("dtype", "page"),
    [(torch.bfloat16, 16), (torch.bfloat16, 64), (torch.float16, 64), (torch.float32, 32)],
)
@pytest.mark.parametrize(
    "heads",
    [Heads(32, 8, 128, 128), Heads(28, 4, 128, 128), Heads(9, 3, 64, 64), Heads(4, 2, 80, 80)],
)
def test_shapes_of_real_models(dtype: torch.dtype, page: int, heads: Heads, is_coded: bool) -> None:
    world = make_world(heads, page, [256, 300, 31, 400], front=32, behind=64)
    compare(world, 61, dtype, coded=world.coded(dtype.itemsize) if is_coded else None)


def test_one_recording_answers_for_prompts_of_any_length() -> None:
    """Also for none: all rows are absent, and come out as zero."""
    sizes, graph = [50, 20, 35], None
    world = make_world(Heads(), 16, sizes, front=3, behind=12)
    steps = PromptSteps(world, 12, torch.float32, None)
    for num_rows in [10, 2, 7] if ON_GPU else [5]:
        wanted = steps.send(num_rows)
        if ON_GPU and graph is None:
            out = steps.attend()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = steps.attend()
        if graph is None:
            out = steps.attend()
        else:
            graph.replay()
        torch.testing.assert_close(out[:num_rows].cpu().double(), wanted, atol=1e-5, rtol=1e-4)
    assert steps.tables.update((), [], [])
    assert not bool(steps.attend().any())


def test_a_prompt_without_room_is_refused_and_nothing_changes() -> None:
    world = make_world(Heads(), 16, [50, 20], front=3, behind=6)
    steps = PromptSteps(world, 4, torch.float32, None)
    wanted = steps.send(4)
    chunks = world.prompts[0].chunks
    assert not steps.tables.update(chunks * MOST_CHUNKS, [1], [0])
    assert not steps.tables.update(chunks, [1], [0] * world.num_pages)
    out = steps.attend()
    torch.testing.assert_close(out.cpu().double(), wanted, atol=1e-5, rtol=1e-4)
