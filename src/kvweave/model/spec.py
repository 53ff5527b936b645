"""What a decoder must know about a model, read from its config.json.

One description covers the RoPE family: Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE. What sets
them apart are a few flags (biases, norms on q and k, routed experts); what we cannot compute
exactly is refused by name rather than approximated.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvweave.errors import ModelCorrupt, ModelNotFound, UnsupportedModel
from kvweave.model.rope import RopeSpec, read_rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Routed experts of a mixture-of-experts layer."""

    num_experts: int
    per_token: int  # experts that each row visits
    inner_dim: int  # width of one expert
    renormalise: bool  # weights of the chosen experts sum to 1
    layers: tuple[int, ...]  # layers that have experts; the others have a plain MLP


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and flags of one model. Immutable; equal specs compute the same function."""

    family: str
    num_layers: int
    hidden_dim: int
    inner_dim: int  # width of the plain MLP
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int  # tokens, prompt and answer together
    norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool = False  # the output layer is the embedding table
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm on each head of q and k, before RoPE
    experts: ExpertSpec | None = None


def read_spec(folder: Path, *, packed: bool = False) -> ModelSpec:
    """The ModelSpec of a model folder. `packed`: its weights may be quantised in a way that another
    program loads."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder} has no config.json; --model wants a Hugging Face folder")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ModelCorrupt(f"{path} is not JSON ({error}); download the model again") from error
    if not isinstance(config, dict):
        raise ModelCorrupt(f"{path} is not a JSON object; download the model again")
    if packed:
        config.pop("quantization_config", None)
    try:
        spec = spec_from_config(config)
        assert_sane(spec)
    except KeyError as error:
        raise ModelCorrupt(f"{path} has no {error}; download the model again") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelCorrupt(f"{path} has a value that makes no sense: {error}") from error
    return spec


def assert_sane(spec: ModelSpec) -> None:
    """Raise ValueError for sizes no model has, so that nothing fails later with a riddle."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.type in (int, "int") and (type(value) is not int or value < 1):
            raise ValueError(f"{field.name} is {value!r}")
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(f"{spec.num_heads} heads cannot share {spec.num_kv_heads} KV heads")
    if not math.isfinite(spec.norm_eps) or not spec.rope.theta > 1:
        raise ValueError(f"norm_eps {spec.norm_eps!r}, rope_theta {spec.rope.theta!r}")


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec of a Hugging Face config. Raises KeyError for a missing field."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"model type {family!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"activation {config['hidden_act']!r} is not supported; only silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(f"weights quantised with {method!r} are not supported; use a GGUF")
    _refuse_sliding_window(config, family)
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_dim=config["hidden_size"],
        inner_dim=config["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        vocab_size=config["vocab_size"],
        max_context=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope=read_rope(config, head_dim),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        experts=_read_experts(config, family),
    )


def _refuse_sliding_window(config: Mapping[str, Any], family: str) -> None:
    """A window that can never bite is fine; one that can is refused."""
    window = config.get("sliding_window")
    if family.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None  # these carry a window in their config and leave it off
    if window is not None and window < config["max_position_embeddings"]:
        raise UnsupportedModel(
            f"sliding_window={window} is active and not supported; use a model without one, or set "
            f"max_position_embeddings to at most {window} in config.json"
        )


def _read_experts(config: Mapping[str, Any], family: str) -> ExpertSpec | None:
    num_layers = config["num_hidden_layers"]
    if family == "mixtral":
        return ExpertSpec(
            num_experts=config["num_local_experts"],
            per_token=config["num_experts_per_tok"],
            inner_dim=config["intermediate_size"],
            renormalise=True,
            layers=tuple(range(num_layers)),
        )
    if family == "qwen3_moe":
        plain = set(config.get("mlp_only_layers") or ())
        step = config.get("decoder_sparse_step", 1)
        return ExpertSpec(
            num_experts=config.get("num_experts") or config["num_local_experts"],
            per_token=config["num_experts_per_tok"],
            inner_dim=config["moe_intermediate_size"],
            renormalise=bool(config.get("norm_topk_prob", False)),
            layers=tuple(i for i in range(num_layers) if i not in plain and (i + 1) % step == 0),
        )
    return None
