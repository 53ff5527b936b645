"""Rotary frequencies of a model, from its config.

Accepted: default, linear, llama3, yarn; any of them on a part of the head. Each depends on the
config alone, so a key stored before rotation can be turned to any position later. Variants whose
frequencies change with the sequence length are refused by name: a stored chunk has seen other
frequencies than the prompt it is woven into.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvweave.errors import UnsupportedModel

ACCEPTED = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Everything that decides the angles. Part of every chunk key."""

    kind: str  # one of ACCEPTED
    theta: float  # base of the frequencies
    rotary_dim: int  # how many dims of a head turn; the rest passes through
    factor: float = 1.0  # stretch of linear, llama3 and yarn
    original_context: int = 0  # llama3, yarn: context length of pretraining
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dims
    attention_factor: float = 1.0  # yarn: multiplies cosine and sine


def read_rope(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """The RopeSpec of a Hugging Face config, in its old (`rope_scaling`) or new form."""
    declared = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in declared.values()):
        raise UnsupportedModel("rope_parameters differ per layer type; kvweave wants one for all")
    kind = declared.get("rope_type") or declared.get("type") or "default"
    if kind not in ACCEPTED:
        raise UnsupportedModel(
            f"rope type {kind!r} is refused: its angles cannot be restored for stored chunk KV; "
            f"accepted: {', '.join(ACCEPTED)}"
        )

    def setting(name: str, default: Any) -> Any:
        value = declared.get(name, config.get(name))
        return default if value is None else value

    rotary_dim = int(head_dim * float(setting("partial_rotary_factor", 1.0)))
    if rotary_dim < 2 or rotary_dim % 2:
        raise UnsupportedModel(f"{rotary_dim} rotary dims of {head_dim} cannot be paired")
    factor = float(setting("factor", 1.0))
    if kind != "default" and factor < 1.0:
        raise UnsupportedModel(f"rope factor must be at least 1, config.json says {factor}")
    return RopeSpec(
        kind=kind,
        theta=float(setting("rope_theta", 10_000.0)),
        rotary_dim=rotary_dim,
        factor=factor,
        original_context=int(
            setting("original_max_position_embeddings", config.get("max_position_embeddings", 0))
        ),
        low_freq_factor=float(setting("low_freq_factor", 1.0)),
        high_freq_factor=float(setting("high_freq_factor", 4.0)),
        beta_fast=float(setting("beta_fast", 32.0)),
        beta_slow=float(setting("beta_slow", 1.0)),
        truncate=bool(setting("truncate", True)),
        attention_factor=_attention_factor(declared, factor) if kind == "yarn" else 1.0,
    )


def frequencies(rope: RopeSpec) -> Tensor:
    """Inverse frequencies [rotary_dim / 2], float32."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / rope.theta**exponents  # [r/2] radians per position
    match rope.kind:
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope)
        case _:
            return plain


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    turns = rope.original_context / wavelength  # full turns within the pretraining context
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / span).clamp(0, 1)  # [r/2] share kept as it is
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Blend by dimension: fast dims extrapolate, slow ones interpolate."""

    def dim_of(num_turns: float) -> float:  # the dim that makes num_turns turns in the context
        ratio = rope.original_context / (num_turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001
    dims = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    stretch = ((dims - low) / width).clamp(0, 1)  # [r/2] share that is interpolated
    return (1 - stretch) * plain + stretch * plain / rope.factor


def _attention_factor(declared: Mapping[str, Any], factor: float) -> float:
    explicit = declared.get("attention_factor")
    if explicit is not None:
        return float(explicit)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = declared.get("mscale"), declared.get("mscale_all_dim")
    return mscale(float(over)) / mscale(float(under)) if over and under else mscale(1.0)
