"""The weights of a decoder, laid out for speed.

Projections that read the same input are fused into one matrix (q, k, v; gate, up): one product
instead of three on the hot path. Names are those of Hugging Face checkpoints.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvweave.kernels.linear import Linear, Projection
from kvweave.model.files.tensor_files import TensorFiles
from kvweave.model.spec import ModelSpec

stages = logging.getLogger("kvweave.stages")  # what a server does before it is ready

# behind the fingerprint of rounded weights; another number when they are rounded another way
ROUNDED = "-int8.3"


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A router and its experts."""

    router: Tensor  # [experts, E]
    gate_up: Sequence[Projection]  # per expert [E] -> [2 I]
    down: Sequence[Projection]  # per expert [I] -> [E]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Exactly one of (gate_up, down) and experts is set."""

    input_norm: Tensor  # [E]
    qkv: Projection  # [E] -> [(Hq + 2 Hk) D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Projection  # [Hq D] -> [E]
    mlp_norm: Tensor  # [E]
    gate_up: Projection | None  # [E] -> [2 I]
    down: Projection | None  # [I] -> [E]
    experts: ExpertWeights | None


@dataclass(frozen=True, slots=True)
class RoundingCost:
    """What was rounded, and at what price."""

    exact_fingerprint: str  # of the weights before they were rounded
    kl_nats: float  # per token, to the exact weights, on a short text (rounding.py)


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model. Read-only once loaded, so any thread may use them."""

    embedding: Tensor  # [V, E]
    layers: Sequence[LayerWeights]
    final_norm: Tensor  # [E]
    head: Projection  # [E] -> [V]
    fingerprint: str  # names the bytes; part of every chunk key
    rounding: RoundingCost | None = None  # None: as the checkpoint has them
    is_random: bool = False  # drawn, for load tests: no checkpoint sets it


class Rounder(Protocol):
    """Rounds a model while it is loaded. Called in this order, layers ascending."""

    def start(self, embedding: Tensor) -> None: ...
    def layer(self, index: int, exact: LayerWeights) -> LayerWeights: ...
    def head(self, final_norm: Tensor, exact: Linear) -> Projection: ...
    def cost(self, fingerprint: str) -> RoundingCost: ...


def load_weights(
    files: TensorFiles,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    rounder: Rounder | None = None,
) -> Weights:
    """Read all weights. `rounder` rounds the products layer by layer; embeddings and norms stay as
    they are.

    Peak memory is the weights themselves plus one matrix, one layer where they are rounded.
    """
    load = _Loader(files, dtype, device)
    embedding = load.matrix("model.embed_tokens.weight", spec.vocab_size, spec.hidden_dim)
    if spec.tied_embeddings:
        head = Linear(embedding)
    else:
        head = Linear(load.matrix("lm_head.weight", spec.vocab_size, spec.hidden_dim))
    layers = _load_layers(load, spec)
    final_norm = load.vector("model.norm.weight", spec.hidden_dim)
    fingerprint = files.fingerprint()
    if rounder is None:
        return Weights(embedding, tuple(layers), final_norm, head, fingerprint)
    rounder.start(embedding)
    rounded = tuple(rounder.layer(i, layer) for i, layer in enumerate(layers))
    rounded_head = rounder.head(final_norm, head)
    cost = rounder.cost(fingerprint)
    return Weights(embedding, rounded, final_norm, rounded_head, fingerprint + ROUNDED, cost)


class _Loader:
    """Allocates, reads and fuses."""

    def __init__(self, files: TensorFiles, dtype: torch.dtype, device: torch.device) -> None:
        self._files, self._dtype, self._device = files, dtype, device

    def vector(self, name: str, dim: int) -> Tensor:
        out = torch.empty(dim, dtype=self._dtype, device=self._device)
        self._files.read_into(name, out)
        return out

    def matrix(self, name: str, rows: int, cols: int) -> Tensor:
        out = torch.empty(rows, cols, dtype=self._dtype, device=self._device)
        self._files.read_into(name, out)
        return out

    def linear(self, parts: Sequence[tuple[str, int]], in_dim: int, bias: bool) -> Projection:
        """One product for several checkpoint matrices (name, output dims), stacked in order."""
        out_dim = sum(dim for _, dim in parts)
        weight = torch.empty(out_dim, in_dim, dtype=self._dtype, device=self._device)
        offsets = torch.empty(out_dim, dtype=self._dtype, device=self._device) if bias else None
        start = 0
        for name, dim in parts:
            self._files.read_into(f"{name}.weight", weight[start : start + dim])
            if offsets is not None:
                self._files.read_into(f"{name}.bias", offsets[start : start + dim])
            start += dim
        return Linear(weight, offsets)


def _load_layers(load: _Loader, spec: ModelSpec) -> Iterator[LayerWeights]:
    for index in range(spec.num_layers):
        stages.info("loading weights", extra={"share": index / spec.num_layers})
        yield _load_layer(load, spec, index)


def _load_layer(load: _Loader, spec: ModelSpec, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}"
    q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attn, E = f"{prefix}.self_attn", spec.hidden_dim
    routed = spec.experts is not None and index in spec.experts.layers
    mlp = f"{prefix}.mlp"
    gate_up = [(f"{mlp}.gate_proj", spec.inner_dim), (f"{mlp}.up_proj", spec.inner_dim)]
    return LayerWeights(
        input_norm=load.vector(f"{prefix}.input_layernorm.weight", E),
        qkv=load.linear(
            [(f"{attn}.q_proj", q_dim), (f"{attn}.k_proj", kv_dim), (f"{attn}.v_proj", kv_dim)],
            E,
            spec.qkv_bias,
        ),
        q_norm=load.vector(f"{attn}.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
        k_norm=load.vector(f"{attn}.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
        out=load.linear([(f"{attn}.o_proj", E)], q_dim, spec.out_bias),
        mlp_norm=load.vector(f"{prefix}.post_attention_layernorm.weight", E),
        gate_up=None if routed else load.linear(gate_up, E, spec.mlp_bias),
        down=None
        if routed
        else load.linear([(f"{mlp}.down_proj", E)], spec.inner_dim, spec.mlp_bias),
        experts=_load_experts(load, spec, prefix) if routed else None,
    )


def _load_experts(load: _Loader, spec: ModelSpec, prefix: str) -> ExpertWeights:
    assert spec.experts is not None, "layer without experts"
    block, gate, up, down = (
        (f"{prefix}.block_sparse_moe", "w1", "w3", "w2")
        if spec.family == "mixtral"
        else (f"{prefix}.mlp", "gate_proj", "up_proj", "down_proj")
    )
    E, inner = spec.hidden_dim, spec.experts.inner_dim
    names = [f"{block}.experts.{i}" for i in range(spec.experts.num_experts)]
    return ExpertWeights(
        router=load.matrix(f"{block}.gate.weight", spec.experts.num_experts, E),
        gate_up=[
            load.linear([(f"{n}.{gate}", inner), (f"{n}.{up}", inner)], E, False) for n in names
        ],
        down=[load.linear([(f"{n}.{down}", E)], inner, False) for n in names],
    )
