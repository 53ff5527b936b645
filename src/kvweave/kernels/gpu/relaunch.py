"""A kernel that is launched layer after layer, past most of what Triton does before each launch.

Triton looks at every argument of every launch to find the kernel that was compiled for such ones:
tens of microseconds on the host, while a layer of some hundred rows has six launches and takes the
device less than a millisecond. Layers of a pass differ in their tensors alone. So a launch is known
by its numbers and by what Triton asks of tensors, their dtype and whether they begin at a multiple
of 16 bytes; where that was seen before, the same kernel is given its arguments at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
from torch import Tensor

KNOWN = "3.6."  # Triton whose launcher this is written for; others are called as they want to be
KEPT = 1024  # launches that are known, per kernel
Grid = tuple[int, int, int]
Number = int | float


class Relaunched:
    """One kernel whose parameters are tensors (the first ones perhaps as descriptors), then
    numbers, then constants. All lie on the current device.

    Used by any thread that launches, as the kernel itself.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        grid: Grid,
        tensors: Sequence[Any],
        numbers: Sequence[Number],
        constants: Mapping[str, object],
        num_warps: int = 4,
    ) -> None:
        """As `kernel[grid](*tensors, *numbers, **constants, num_warps=num_warps)`. `constants` in
        the order of the kernel's parameters."""
        device = tensors[-1].get_device()
        key = (
            device,
            num_warps,
            *numbers,
            *constants.values(),
            *map(_kind, tensors),
        )
        known = self._known.get(key)
        if known is None or _is_watched():
            self._launch(key, grid, tensors, numbers, constants, num_warps)
            return
        stream = triton.runtime.driver.active.get_current_stream(device)
        known.run(
            *grid, stream, known.function, known.packed_metadata, None, None, None,
            *tensors, *numbers, *constants.values(),
        )  # fmt: skip

    def _launch(
        self,
        key: tuple[object, ...],
        grid: Grid,
        tensors: Sequence[Any],
        numbers: Sequence[Number],
        constants: Mapping[str, object],
        num_warps: int,
    ) -> None:
        """Triton's own way, which is remembered."""
        names = self._kernel.arg_names
        assert names[len(names) - len(constants) :] == list(constants), "constants in their order"
        made = self._kernel[grid](*tensors, *numbers, **constants, num_warps=num_warps)
        if made is None or not triton.__version__.startswith(KNOWN):  # the interpreter has none
            return
        if len(self._known) >= KEPT:
            self._known.clear()
        self._known[key] = made


def _kind(x: Any) -> object:
    """What Triton compiles for: of a descriptor all but where its tensor lies."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    return x.base.dtype, tuple(x.block_shape), x.layout


def _is_watched() -> bool:
    """Whether somebody wants to hear of launches."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
