"""Kernels that are launched without Triton's look at their arguments, against those with it.

Needs PyTorch with Triton and a CUDA device: `pytest -m gpu tests/gpu`.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of PyTorch")

import triton
import triton.language as tl
from triton import knobs

from kvweave.kernels.gpu.quick import QuickKernel, quick
from kvweave.kernels.recording import num_first_times

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@quick
@triton.jit(do_not_specialize=["count"])
def add_strided(x_ptr, out_ptr, count, step, by, twice: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + at * step, at < count, other=0.0)
    tl.store(out_ptr + at, (x + by) * (2 if twice else 1), at < count)


def launch(x: torch.Tensor, step: int, by: float, *, twice: bool = False) -> torch.Tensor:
    out = torch.empty(len(x) // step, device=x.device, dtype=x.dtype)
    add_strided[(-(-len(out) // 64),)](x, out, len(out), step, by, twice=twice, block=64)
    return out


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("step", [1, 2, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_kind_of_argument_finds_its_own_kernel(
    dtype: torch.dtype, step: int, twice: bool
) -> None:
    whole = torch.arange(4096, device="cuda", dtype=dtype) % 128
    for turn in range(3):  # the first time by Triton, then without
        for offset in (0, 1, 8):  # addresses that are multiples of 16, and others
            for length in (3000, 16 * step, step):
                x, by = whole[offset : offset + length], 1.5 + turn
                want = (x[::step][: length // step] + by) * (2 if twice else 1)
                torch.testing.assert_close(launch(x, step, by, twice=twice), want.to(dtype))


def test_a_launch_that_was_seen_before_does_not_ask_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(add_strided, QuickKernel)
    if not add_strided.is_quick:
        pytest.skip(f"Triton {triton.__version__} launches for itself")
    x = torch.ones(256, device="cuda")
    launch(x, 1, 1.0)
    asked: list[object] = []
    monkeypatch.setattr(type(add_strided._kernel), "run", lambda *a, **k: asked.append(a))
    torch.testing.assert_close(launch(x, 1, 3.0), x + 3)
    assert not asked
    before = num_first_times()
    launch(x, 1, 4.0)
    assert num_first_times() == before
    launch(x.double(), 1, 3.0)
    assert asked, "another type is another kernel"
    assert num_first_times() == before + 1


def test_a_profiler_hears_of_every_launch() -> None:
    x, heard = torch.ones(256, device="cuda"), []
    launch(x, 1, 1.0)
    hook = heard.append
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(x, 1, 1.0)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert len(heard) == 1


def test_launches_are_recorded_and_played() -> None:
    x = torch.ones(256, device="cuda")
    launch(x, 1, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(x, 1, 2.0)
    x.fill_(5.0)
    graph.replay()
    torch.testing.assert_close(out, x + 2)
