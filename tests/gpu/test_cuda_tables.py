"""Tables that the device fetches itself: their bytes, their order, and past a line of copies.

Needs PyTorch with Triton and a CUDA device: `pytest -m gpu tests/gpu`.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of PyTorch")

from kvweave.kernels.gpu.tables import HALF_BYTES, can_fetch, fetch
from kvweave.kernels.host import on_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU"),
]
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bool, torch.int8])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 333), (3, 5, 1000)])
def test_a_table_arrives_as_it_is(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    table = torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)
    there = fetch(table, DEVICE)
    assert (there.dtype, there.shape) == (dtype, table.shape)
    assert torch.equal(there.cpu(), table)
    turned = table.transpose(0, -1)
    assert torch.equal(fetch(turned, DEVICE).cpu(), turned)


def test_many_tables_in_a_row_are_all_what_they_were() -> None:
    """More than the memory they pass through, with the device always behind."""
    torch.cuda._sleep(20_000_000)
    tables = [torch.full((HALF_BYTES // 80,), i, dtype=torch.int64) for i in range(100)]
    there = [on_device(table, DEVICE) for table in tables]
    tables[0].fill_(-1)  # the host's own copy is free at once
    for i, table in enumerate(there):
        assert bool((table == i).all())


def test_streams_do_not_share_what_tables_pass_through() -> None:
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(20_000_000)
        late = fetch(torch.full((1000,), 7), DEVICE)
    here = [fetch(torch.full((HALF_BYTES // 8,), i), DEVICE) for i in range(4)]
    other.synchronize()
    assert bool((late == 7).all())
    assert [int(x[-1]) for x in here] == [0, 1, 2, 3]


def test_a_table_overtakes_copies_that_were_ordered_before_it() -> None:
    """A copy waits for all copies before it, on whatever stream; a table does not."""
    bulk = torch.empty(256 << 20, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(bulk, device=DEVICE)
    copies, small = torch.cuda.Stream(), torch.arange(100)
    fetch(small, DEVICE)  # whatever is made on first use
    torch.cuda.synchronize()
    with torch.cuda.stream(copies):
        for _ in range(8):  # 2 GB: tens of milliseconds
            there.copy_(bulk, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    table = fetch(small, DEVICE)
    torch.cuda.current_stream().synchronize()
    assert not done.query(), "the copies should still be on their way"
    assert torch.equal(table.cpu(), small)
    torch.cuda.synchronize()


def test_what_is_large_goes_another_way() -> None:
    assert can_fetch(HALF_BYTES)
    assert not can_fetch(HALF_BYTES + 1)
    assert not can_fetch(0)
    large = torch.arange(HALF_BYTES // 8 + 1)
    assert torch.equal(on_device(large, DEVICE).cpu(), large)
    assert on_device(torch.empty(0), DEVICE).shape == (0,)


def test_no_table_passes_through_kept_memory_while_a_graph_is_recorded() -> None:
    """The recording would read that memory again at every replay, whatever stands there by then."""
    there = fetch(torch.arange(8), DEVICE)  # whatever is made on first use
    graph, answers = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        answers.append(can_fetch(64))
        there += 1
    answers.append(can_fetch(64))
    assert answers == [False, True]
    graph.replay()
    assert torch.equal(there.cpu(), torch.arange(8) + 1)
