"""A kernel that is launched in every layer of every pass, without Triton's look at its arguments.

For every launch Triton works out which compiled kernel its arguments ask for, which takes the host
longer than many of these kernels take the device. But from one layer to the next they differ in
addresses and counts alone: the kernel that served before is found by what a kernel depends on
(types, strides, whether addresses are multiples of 16) and called at once. What was not seen before
goes through Triton, which compiles it if need be.

Tensors lie on the device, or in page-locked memory that it reads at the host's addresses: nothing
looks at that again.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from kvweave.kernels.recording import note_first_time

TESTED = "3.6."  # Triton whose compiled kernels are called here; that changes from one to the next
MOST_INT32 = 2**31 - 1


class QuickKernel:
    """Is called as the kernel it is made of: `kernel[grid](*arguments, **constants)`. Constants
    come last in its signature, all of them are given, and by name."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self.is_quick = isinstance(kernel, JITFunction) and triton.__version__.startswith(TESTED)
        if self.is_quick:
            from triton import knobs

            given = [each for each in kernel.params if not each.is_constexpr]
            assert given == kernel.params[: len(given)], "constants come last"
            self._is_free = [each.do_not_specialize for each in given]
            self._constants = [each.name for each in kernel.params[len(given) :]]
            self._runtime = knobs.runtime

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if not self.is_quick or self._is_watched:
            return self._kernel[grid]
        return lambda *given, **constants: self._launch(grid, given, constants)

    @property
    def _is_watched(self) -> bool:
        """Whether a profiler wants to hear of every launch."""
        hooks = (self._runtime.launch_enter_hook, self._runtime.launch_exit_hook)
        return any(getattr(hook, "calls", True) for hook in hooks)

    def _launch(
        self, grid: tuple[int, ...], given: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        device = torch.cuda.current_device()
        key: list[Any] = [device, *constants.items()]
        sent: list[Any] = []  # addresses instead of tensors: the launch need not ask for them
        for each, is_free in zip(given, self._is_free, strict=True):
            if isinstance(each, Tensor):
                address = each.data_ptr()
                sent.append(address)
                key.append(each.dtype if is_free or address % 16 else (each.dtype, 16))
            else:
                sent.append(each)
                key.append(_kind(each, is_free))
        found = self._compiled.get(tuple(key))
        if found is None:
            note_first_time(self._kernel.__name__)
            self._compiled[tuple(key)] = self._kernel[grid](*given, **constants)
            return
        across, down, deep = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        found.run(
            across, down, deep, stream, found.function, found.packed_metadata, None, None, None,
            *sent, *[constants[name] for name in self._constants],
        )  # fmt: skip


def _kind(given: Any, is_free: bool) -> Any:
    """What a compiled kernel depends on of an argument that is no tensor, as Triton sees it."""
    if isinstance(given, int):
        if given == 1 and not is_free:
            return 1
        return (given > MOST_INT32, given % 16 == 0 and not is_free)
    if given is None or isinstance(given, float):
        return type(given)
    return (given.base.dtype, tuple(given.block_shape), given.layout)  # a TensorDescriptor


def quick(kernel: Any) -> QuickKernel:
    """A decorator, above that of Triton."""
    return QuickKernel(kernel)
