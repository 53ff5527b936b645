"""A model folder whose weights are packed to 4 bits as GPTQ packs them, made from another folder.

Weights are rounded to the nearest, which is not what GPTQ is liked for; the format is the same.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BITS, GROUP = 4, 32
MIDDLE = 1 << (BITS - 1)  # the code of zero
PER_WORD = 32 // BITS


def make_gptq_folder(model: Path, folder: Path) -> Path:
    """Pack every product of every layer; embeddings, norms and biases stay."""
    folder.mkdir(parents=True)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (model / name).is_file():
            shutil.copy(model / name, folder / name)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": BITS,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    packed: dict[str, Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            base = name.removesuffix(".weight")
            packed |= {f"{base}.{part}": each for part, each in _pack(tensor.float()).items()}
        else:
            packed[name] = tensor
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _pack(weight: Tensor) -> dict[str, Tensor]:
    """GPTQ's tensors of a weight [out, in]: codes along the input, a scale for each group of it."""
    rows = weight.t().contiguous()  # [in, out]
    size, width = rows.shape
    groups = rows.view(size // GROUP, GROUP, width)
    scales = (groups.abs().amax(1) / (MIDDLE - 1)).clamp(min=1e-8)
    codes = ((groups / scales[:, None]).round() + MIDDLE).clamp(0, 2 * MIDDLE - 1)
    words = codes.view(size // PER_WORD, PER_WORD, width).to(torch.int64)
    shifts = torch.arange(0, 32, BITS)[None, :, None]
    zeros = torch.full((size // GROUP, width // PER_WORD), 0x77777777, dtype=torch.int32)
    return {
        "qweight": (words << shifts).sum(1).to(torch.int32),  # wraps into the sign
        "qzeros": zeros,  # one less than the code of zero
        "scales": scales.half(),
        "g_idx": torch.arange(size, dtype=torch.int32) // GROUP,
    }
