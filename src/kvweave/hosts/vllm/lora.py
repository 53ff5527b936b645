"""LoRA adapters: chunk KV belongs to all weights that computed it, an adapter's among them.

vLLM's layers hold the adapters that are loaded side by side in slots, and a mapping from rows of
its batch to slots. The rows of a fused pass are no part of that batch. So they go through the
product below an adapter's layer, and the slot's two small products are added to it here.
"""

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvweave.errors import RequestError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MOST_KNOWN = 4096  # adapters that are remembered
# what a fused pass adds: the products of layers, and nothing of embeddings or the head
ADDED = re.compile(
    r".*\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.lora_[AB]\.weight"
)


class Adapter(NamedTuple):
    """An adapter of a request."""

    number: int  # vLLM's, by which its slot is found
    digest: str  # of its files: names chunk KV, whatever it is called


class AdapterNames:
    """Names adapters by their files. On the scheduler's thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], Adapter] = {}  # by number and folder

    def name(self, lora: Any) -> Adapter:
        """The adapter of a vLLM request. Its files are read once: what vLLM has loaded under a
        number from a folder stays, but for adapters that are replaced in place. Raises RequestError
        for what is not added."""
        if getattr(lora, "load_inplace", False):
            raise RequestError("a LoRA adapter that is replaced in place cannot be fused")
        key = number, path = int(lora.lora_int_id), str(lora.lora_path)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Adapter(number, _digest(Path(path)))
            while len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return found


def _digest(folder: Path) -> str:
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="np") as file:
            others = [name for name in file.keys() if not ADDED.fullmatch(name)]  # noqa: SIM118
        if others:
            raise RequestError(f"the LoRA adapter has {others[0]!r}, which cannot be fused")
        digest = hashlib.blake2b(path.read_bytes(), digest_size=16)
        digest.update((folder / CONFIG).read_bytes())
    except (OSError, SafetensorError) as error:
        raise RequestError(
            f"a LoRA adapter without a readable {WEIGHTS} in a folder here cannot be fused"
        ) from error
    return digest.hexdigest()


def base_of(module: Any) -> Any:
    """The module below an adapter's layer; the module itself where there is none."""
    return getattr(module, "base_layer", module)


def find_slot(model: Any, number: int) -> int:
    """The slot that holds an adapter now. Raises ValueError if none does."""
    slots: list[int | None] = model.lora_manager.lora_index_to_id
    return slots.index(number)


def add_adapter(made: Tensor, x: Tensor, module: Any, slot: int) -> None:
    """Add what the adapter in a slot makes of rows x [R, in] to `made` [R, out]. Where it has
    nothing for this module, its slot is zero."""
    start = 0
    for down, up in zip(module.lora_a_stacked, module.lora_b_stacked, strict=True):
        inner = x @ down[slot, 0].t()  # [R, rank]
        width = up.shape[2]
        made[:, start : start + width] += inner @ up[slot, 0].t()
        start += width
