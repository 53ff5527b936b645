"""What this vLLM cannot have fused, by name, before it serves anything.

A setting that would make fused KV wrong, or that the connector cannot see through, ends the start
with one line that names it. `config_complaints` looks at the configuration, in both halves;
`model_complaints` at the modules, once they are loaded.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvweave.errors import ConfigError
from kvweave.hosts.vllm.adapter import VllmDecoder
from kvweave.model.spec import ModelSpec

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
PARALLEL = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
ANGLE_STEP = 97  # angles are compared at every such position
ANGLE_ERROR = 2e-2  # of cosine and sine: they may be kept in 16 bits; wrong ones are off by one


def refuse(complaints: Sequence[str]) -> None:
    """Raise ConfigError with all complaints, if there are any."""
    if complaints:
        raise ConfigError(f"kvweave cannot fuse inside this vLLM: {'; '.join(complaints)}")


def config_complaints(config: Any) -> list[str]:
    """What a VllmConfig asks for that cannot be fused."""
    parallel, model = config.parallel_config, config.model_config
    sizes = {name: getattr(parallel, name, 1) for name in PARALLEL}
    found = [
        f"{name} is {size}, and every worker fuses all layers of all tokens"
        for name, size in sizes.items()
        if size > 1
    ]
    if parallel.tensor_parallel_size > 1 and config.lora_config is not None:
        found.append("--enable-lora with tensor_parallel_size: what adapters add is not summed")
    kept = str(config.cache_config.cache_dtype)
    if kept not in ("auto", str(model.dtype).removeprefix("torch.")):
        found.append(
            f"the KV cache is {kept!r}, and chunk KV is written as the model computes it; "
            "leave --kv-cache-dtype at auto"
        )
    speculative = config.speculative_config
    if speculative is not None and getattr(speculative, "method", None) != "ngram":
        found.append("speculative decoding has a draft model whose KV nobody would fill")
    if not set(model.architectures) & set(ARCHITECTURES):
        known = ", ".join(ARCHITECTURES)
        found.append(f"model {', '.join(model.architectures)} is not one of {known}")
    if getattr(model, "is_multimodal_model", False):
        found.append("the model is multimodal")
    if model.runner_type != "generate":
        found.append(f"runner {model.runner_type!r} generates nothing")
    return found


def model_complaints(model: Any, spec: ModelSpec) -> list[str]:
    """Where the loaded modules differ from what config.json says."""
    layers = list(getattr(getattr(model, "model", None), "layers", ()))
    if len(layers) != spec.num_layers:
        return [f"{type(model).__name__} has {len(layers)} layers, config.json {spec.num_layers}"]
    kinds = {type(layer).__name__ for layer in layers}
    if not kinds <= set(LAYERS):
        return [f"layers of kind {', '.join(sorted(kinds))}; known: {', '.join(LAYERS)}"]
    attention = [layer.self_attn for layer in layers]
    complaints = _attention_complaints(attention, spec) + _angle_complaints(model, spec)
    return complaints + cache_complaints(attention, model.model.norm.weight.dtype)


def cache_complaints(layers: Sequence[Any], dtype: torch.dtype) -> list[str]:
    """Where quantised weights bring a KV cache of another dtype along, whatever the flag says."""
    kept = {getattr(layer.attn, "kv_cache_torch_dtype", dtype) for layer in layers}
    if kept <= {dtype}:
        return []
    names = ", ".join(sorted(str(each).removeprefix("torch.") for each in kept))
    wanted = str(dtype).removeprefix("torch.")
    return [f"these weights keep their KV in {names}; say --kv-cache-dtype {wanted}"]


def _attention_complaints(layers: Sequence[Any], spec: ModelSpec) -> list[str]:
    """Where attention computes something else than config.json says, or cannot be written."""
    found = []
    first = layers[0]
    heads = first.num_heads, first.num_kv_heads, first.head_dim
    if heads != (spec.num_heads, spec.num_kv_heads, spec.head_dim):
        found.append(f"attention of shape {heads} is not that of config.json")
    if abs(first.scaling * spec.head_dim**0.5 - 1) > 1e-6:
        found.append(f"attention is scaled by {first.scaling:g}")
    if any(getattr(layer, "do_llama_4_scaling", False) for layer in layers):
        found.append("queries are scaled by position")
    if any(getattr(layer, "dual_chunk_attention_config", None) for layer in layers):
        found.append("attention is cut into dual chunks")
    return found + _backend_complaints([layer.attn.impl for layer in layers])


def _backend_complaints(impls: Sequence[Any]) -> list[str]:
    """What the attention backend does that fusing does not."""
    found = []
    windows = {getattr(impl, "sliding_window", None) for impl in impls}
    if not windows <= {None, -1, (-1, -1)}:
        found.append("attention has a sliding window")
    if any(getattr(impl, "alibi_slopes", None) is not None for impl in impls):
        found.append("attention has ALiBi slopes")
    if any(getattr(impl, "logits_soft_cap", 0) for impl in impls):
        found.append("attention logits are capped")
    if any(getattr(impl, "sinks", None) is not None for impl in impls):
        found.append("attention has sinks")
    if not all(hasattr(impl, "do_kv_cache_update") for impl in impls):
        found.append(f"backend {type(impls[0]).__name__} has no operator that writes KV")
    return found


def _angle_complaints(model: Any, spec: ModelSpec) -> list[str]:
    """Stored keys are turned by kvweave, fresh ones by vLLM: both must mean the same."""
    rope = model.model.layers[0].self_attn.rotary_emb
    if not getattr(rope, "is_neox_style", True):
        return ["rotary dims are paired side by side"]
    theirs = getattr(rope, "cos_sin_cache", None)
    if theirs is None:
        return [f"{type(rope).__name__} shows no angles to compare"]
    positions = torch.arange(0, min(len(theirs), spec.max_context), ANGLE_STEP)
    cos, sin = theirs[positions.to(theirs.device)].float().chunk(2, dim=-1)
    ours = VllmDecoder(model, spec).angles(positions.to(theirs.device))
    for mine, other in ((ours.cos[:, 0], cos), (ours.sin[:, 0], sin)):
        if mine.shape != other.shape:
            return ["rotary dims are not those of config.json"]
        if (mine.float() - other).abs().max() > ANGLE_ERROR:
            return ["rotary angles are not those of config.json"]
    return []
