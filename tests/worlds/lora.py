"""A LoRA adapter as PEFT saves it, with random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

RANK, ALPHA = 4, 8
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


def make_adapter(model: Path, folder: Path, seed: int, strength: float = 0.02) -> Path:
    """Of every product of every layer of the model in a folder."""
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [f"{each}_proj" for each in PROJECTIONS],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    drawn = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            base = f"base_model.model.{name.removesuffix('.weight')}"
            width, size = weight.shape
            made[f"{base}.lora_A.weight"] = torch.randn(RANK, size, generator=drawn) / size**0.5
            made[f"{base}.lora_B.weight"] = strength * torch.randn(width, RANK, generator=drawn)
    save_file(made, folder / "adapter_model.safetensors")
    return folder
