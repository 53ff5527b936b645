"""A server whose device is lost when a bench wants it: `main` is `kvweave` with a hook.

    python -c "from reliability.lost_device import main; main()" FILE serve …

While FILE is there, the next step of the engine loses the device, until the process ends. On a GPU
a kernel asserts, as one that reads beyond its tensors would: all that is asked of CUDA from then on
is an error. Elsewhere every step fails.
"""

import sys
from pathlib import Path
from typing import Any

import torch


def lose_device(device: torch.device) -> None:
    """Raise what a device that is lost raises; on a GPU it is lost then."""
    if device.type == "cuda":
        beyond = torch.tensor([1 << 20], device=device)
        torch.zeros(1, device=device).index_select(0, beyond)
        torch.cuda.synchronize(device)
    raise RuntimeError("the device is lost, as the bench wanted")


def hook(file: Path) -> None:
    """Let the engine's steps look at the file."""
    from kvweave.engine.runner import Runner

    forward, is_lost = Runner._forward, False

    def failing(self: Runner, *args: Any) -> Any:
        nonlocal is_lost
        is_lost = is_lost or file.exists()
        if is_lost:
            lose_device(self.device)
        return forward(self, *args)

    Runner._forward = failing  # type: ignore[assignment, method-assign]


def main() -> None:
    hook(Path(sys.argv[1]))
    sys.argv = ["kvweave", *sys.argv[2:]]
    from kvweave.cli import main as run

    run()
