"""Models that nobody has prepared: folders made of an embedded one, which no packaged table names.

stranger:NAME   its weights in bfloat16, as model hubs have them
noise:NAME      its tokenizer and first ten layers with drawn weights: what must not be fused
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvweave.model.files.locate import locate

KINDS = ("stranger", "noise")
NOISE_LAYERS = 10
NOISE_STD = 0.02
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def prepare_model(name: str, folder: Path) -> str:
    """Return what `kvweave serve` takes for `name`: a stranger's folder, or the name itself."""
    kind, _, source_name = name.partition(":")
    if kind not in KINDS:
        return name
    source, target = locate(source_name), folder / kind
    target.mkdir(parents=True)
    for each in COPIED:
        shutil.copy(source / each, target / each)
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    if kind == "noise":
        config["num_hidden_layers"] = NOISE_LAYERS
        drawn = torch.Generator().manual_seed(0)
        weights = {
            key: value if value.ndim == 1 else torch.randn(value.shape, generator=drawn) * NOISE_STD
            for key, value in weights.items()
            if layer_of(key) < NOISE_LAYERS
        }
    config["torch_dtype"] = "bfloat16"
    (target / "config.json").write_text(json.dumps(config))
    halves = {key: value.to(torch.bfloat16).contiguous() for key, value in weights.items()}
    save_file(halves, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def layer_of(key: str) -> int:
    """The layer that a weight belongs to; -1 for those outside of them."""
    parts = key.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1
