"""The config.json of a GGUF file: the same facts under Hugging Face's names.

Anything in the metadata that would change the result and that we do not carry over is refused by
name. A model that silently runs with half its settings is worse than one that does not run.
"""

from typing import Any, TypeVar

import numpy as np

from kvweave.errors import ModelCorrupt, UnsupportedModel
from kvweave.model.gguf import GGUFFile
from kvweave.model.gguf_rope import read_rope

# GGUF architecture → transformers class and model_type; llama with experts is Mixtral
_CLASSES: dict[tuple[str, bool], tuple[str, str]] = {
    ("llama", False): ("LlamaForCausalLM", "llama"),
    ("llama", True): ("MixtralForCausalLM", "mixtral"),
    ("qwen2", False): ("Qwen2ForCausalLM", "qwen2"),
    ("qwen3", False): ("Qwen3ForCausalLM", "qwen3"),
    ("qwen3moe", True): ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
ARCHITECTURES = tuple(dict.fromkeys(arch for arch, _ in _CLASSES))

# settings of the same decoder family that no model of ours has: value that means "not used"
_MUST_BE_NEUTRAL: dict[str, float] = {
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "expert_shared_count": 0,
    "leading_dense_block_count": 0,
}

T = TypeVar("T", int, float, str, bool)


class Settings:
    """Typed access to the metadata of one architecture: `llama.block_count` is `block_count`."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.path = gguf.path
        self._metadata = gguf.metadata
        arch = gguf.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise ModelCorrupt(f"{self.path} names no general.architecture; download it again")
        if arch not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{self.path} has architecture {arch!r}; supported: {', '.join(ARCHITECTURES)}"
            )
        self.arch = arch

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        value = self._metadata.get(f"{self.arch}.{key}")
        if value is None:
            return default
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # one number per layer, all alike
        if isinstance(value, list):
            raise UnsupportedModel(f"{self.path}: {self.arch}.{key} differs from layer to layer")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind):
            raise ModelCorrupt(
                f"{self.path}: {self.arch}.{key} is {value!r}, not {kind.__name__}; "
                "download it again"
            )
        # GGUF keeps float32: 1e-05 must not come back as 9.999999747378752e-06
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str, kind: type[T]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise ModelCorrupt(f"{self.path} has no metadata {self.arch}.{key}; download it again")
        return value

    def count(self, key: str) -> int:
        """A number of things: at least one."""
        value = self.need(key, int)
        if value < 1:
            raise ModelCorrupt(f"{self.path}: {self.arch}.{key} is {value}; download it again")
        return value


def read_config(gguf: GGUFFile) -> dict[str, Any]:
    """The contents of config.json. Raises UnsupportedModel or ModelCorrupt with one line."""
    s = Settings(gguf)
    _refuse_what_we_would_drop(s, gguf)
    num_experts = s.get("expert_count", int, 0) or 0
    found = _CLASSES.get((s.arch, num_experts > 0))
    if found is None:
        raise UnsupportedModel(f"{s.path} is {s.arch} with {num_experts} experts, which is unknown")
    class_name, model_type = found
    hidden = s.count("embedding_length")
    heads = s.count("attention.head_count")
    kv_heads = s.get("attention.head_count_kv", int, heads)
    head_dim = s.get("attention.key_length", int, hidden // heads)
    assert kv_heads is not None
    assert head_dim is not None
    if kv_heads < 1 or head_dim < 1 or heads % kv_heads:
        raise ModelCorrupt(f"{s.path}: {heads} heads over {kv_heads} KV heads; download it again")
    if s.get("attention.value_length", int, head_dim) != head_dim:
        raise UnsupportedModel(f"{s.path}: values and keys have different head sizes")
    if s.get("rope.dimension_count", int, head_dim) != head_dim:
        raise UnsupportedModel(f"{s.path}: RoPE over a part of the head (partial rotary)")
    context = s.count("context_length")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelCorrupt(f"{s.path} has no tensor token_embd.weight; download it again")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": s.count("feed_forward_length"),
        "num_hidden_layers": s.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": s.need("attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "float32",
        "vocab_size": embedding.shape[0],
        **read_rope(gguf, s, head_dim, context),
    }
    if s.arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    if model_type == "mixtral":
        config["num_local_experts"] = num_experts
        config["num_experts_per_tok"] = s.count("expert_used_count")
    if model_type == "qwen3_moe":
        config["num_experts"] = num_experts
        config["num_experts_per_tok"] = s.count("expert_used_count")
        config["moe_intermediate_size"] = s.count("expert_feed_forward_length")
        config["norm_topk_prob"] = True  # GGUF runtimes always do; the file has no key for it
        config["decoder_sparse_step"] = 1
        config["mlp_only_layers"] = []
    for key in ("bos", "eos", "padding"):
        token_id = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int):
            config[f"{'pad' if key == 'padding' else key}_token_id"] = token_id
    return config


def _refuse_what_we_would_drop(s: Settings, gguf: GGUFFile) -> None:
    if gguf.metadata.get("split.count", 0) > 1:
        raise UnsupportedModel(
            f"{s.path} is one of {gguf.metadata['split.count']} parts; "
            "merge them first (llama-gguf-split --merge)"
        )
    for key, neutral in _MUST_BE_NEUTRAL.items():
        value = s.get(key, float)
        if value is not None and value != neutral:
            raise UnsupportedModel(f"{s.path}: {s.arch}.{key} = {value} is not supported")
    window = s.get("attention.sliding_window", int, 0) or 0
    context = s.count("context_length")
    if 0 < window < context:
        raise UnsupportedModel(
            f"{s.path} attends through a sliding window of {window} tokens, which is not supported"
        )
