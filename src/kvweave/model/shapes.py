"""Shapes of real models with random weights, made on the device: for load tests and benches.

They compute what a model of that shape computes, as fast, and what they say means nothing.
"""

import torch

from kvweave.errors import ConfigError
from kvweave.kernels.linear import Linear
from kvweave.model.decoder import Decoder
from kvweave.model.rope import RopeSpec
from kvweave.model.spec import ModelSpec
from kvweave.model.weights import LayerWeights, Weights

SHAPES = {
    "llama-3.1-8b": ModelSpec(
        family="llama", num_layers=32, hidden_dim=4096, inner_dim=14336, num_heads=32,
        num_kv_heads=8, head_dim=128, vocab_size=128256, max_context=131072, norm_eps=1e-5,
        rope=RopeSpec("llama3", 500_000.0, 128, factor=8.0, original_context=8192),
    ),
    "qwen2.5-7b": ModelSpec(
        family="qwen2", num_layers=28, hidden_dim=3584, inner_dim=18944, num_heads=28,
        num_kv_heads=4, head_dim=128, vocab_size=152064, max_context=32768 + 4096, norm_eps=1e-6,
        rope=RopeSpec("default", 1_000_000.0, 128), qkv_bias=True,
    ),
    "mistral-7b": ModelSpec(
        family="mistral", num_layers=32, hidden_dim=4096, inner_dim=14336, num_heads=32,
        num_kv_heads=8, head_dim=128, vocab_size=32768, max_context=32768 + 4096, norm_eps=1e-5,
        rope=RopeSpec("default", 1_000_000.0, 128),
    ),
    "tiny": ModelSpec(  # to try things out without a GPU
        family="llama", num_layers=4, hidden_dim=64, inner_dim=128, num_heads=4, num_kv_heads=2,
        head_dim=16, vocab_size=512, max_context=131072, norm_eps=1e-5,
        rope=RopeSpec("default", 10_000.0, 16),
    ),
}  # fmt: skip


def random_decoder(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder of `spec` whose weights are noise small enough to stay finite."""
    # torch's meta device has shapes and no numbers
    drawn = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def matrix(rows: int, cols: int) -> torch.Tensor:
        made = torch.empty(rows, cols, dtype=dtype, device=device)
        return made.normal_(0, 0.02, generator=drawn)

    def ones() -> torch.Tensor:
        return torch.ones(spec.hidden_dim, dtype=dtype, device=device)

    q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    bias = torch.zeros(q_dim + 2 * kv_dim, dtype=dtype, device=device) if spec.qkv_bias else None
    layers = tuple(
        LayerWeights(
            input_norm=ones(),
            qkv=Linear(matrix(q_dim + 2 * kv_dim, spec.hidden_dim), bias),
            q_norm=None,
            k_norm=None,
            out=Linear(matrix(spec.hidden_dim, q_dim)),
            mlp_norm=ones(),
            gate_up=Linear(matrix(2 * spec.inner_dim, spec.hidden_dim)),
            down=Linear(matrix(spec.hidden_dim, spec.inner_dim)),
            experts=None,
        )
        for _ in range(spec.num_layers)
    )
    embedding = matrix(spec.vocab_size, spec.hidden_dim)
    fingerprint = f"random-{device.type}"  # which draws its own; a revision names the spec too
    head = Linear(matrix(spec.vocab_size, spec.hidden_dim))
    return Decoder(spec, Weights(embedding, layers, ones(), head, fingerprint, is_random=True))


def find_shape(name: str) -> ModelSpec:
    """The shape called `name`. Raises ConfigError."""
    if name not in SHAPES:
        raise ConfigError(f"no shape {name!r}; there are: {', '.join(SHAPES)}")
    return SHAPES[name]
