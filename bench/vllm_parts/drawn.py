"""What the bench installs beside vLLM, in each of its processes: weights of a useful size, and rows
that lie spread.

vLLM draws dummy weights between -0.001 and 0.001, norms included: then all rows of a prompt are
looked at alike to the last bit, and whatever comes first among equals is chosen. Drawn as our own
benches draw them scores differ. And `weave` takes cheap rows, at the front of a prompt, where all
are looked at much alike; `spread` is `weave` without that.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

STD = 0.02
METADATA = "Metadata-Version: 2.1\nName: kvweave-bench\nVersion: 0\n"
ENTRIES = """[vllm.general_plugins]
kvweave-bench = vllm_parts.drawn:register
[kvweave.selectors]
spread = vllm_parts.drawn:spread
"""


def install(folder: Path) -> None:
    """Make what is here known to processes that have `folder` on their path."""
    info = folder / "kvweave_bench-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRIES)


def register() -> None:
    from vllm.model_executor.model_loader import dummy_loader

    dummy_loader.initialize_dummy_weights = draw_weights


def draw_weights(model: Any, model_config: Any) -> None:
    """Fill what the model has: matrices are drawn, norms are ones."""
    import torch

    for number, each in enumerate(model.parameters(recurse=False)):
        if each.dim() > 1:
            drawn = torch.Generator(each.device).manual_seed(each.numel() + number)
            each.data.normal_(0, STD, generator=drawn)
        else:
            each.data.fill_(1.0)


def spread(facts: Any) -> Any:
    from kvweave.fuse.selectors.strategies import open_strategy

    strategy = open_strategy("weave", facts)
    return replace(strategy, selector=replace(strategy.selector, late=0.0))
