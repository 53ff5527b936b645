"""The config.json of a GGUF file: the same facts under Hugging Face's names.

Anything in the metadata that would change the result and that we do not carry over is refused by
name. A model that silently runs with half its settings is worse than one that does not run.
"""

from typing import Any

from kvweave.errors import ModelCorrupt, UnsupportedModel
from kvweave.model.files.gguf import GGUFFile
from kvweave.model.files.gguf_rope import read_rope
from kvweave.model.files.gguf_settings import Settings

# GGUF architecture → transformers class and model_type; llama with experts is Mixtral
_CLASSES: dict[tuple[str, bool], tuple[str, str]] = {
    ("llama", False): ("LlamaForCausalLM", "llama"),
    ("llama", True): ("MixtralForCausalLM", "mixtral"),
    ("qwen2", False): ("Qwen2ForCausalLM", "qwen2"),
    ("qwen3", False): ("Qwen3ForCausalLM", "qwen3"),
    ("qwen3moe", True): ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
ARCHITECTURES = tuple(dict.fromkeys(arch for arch, _ in _CLASSES))

# settings of the same decoder family that change the result: values that mean "not used"
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0.0, 1.0),  # softmax
    "expert_shared_count": (0.0,),
    "leading_dense_block_count": (0.0,),
}


def read_config(gguf: GGUFFile) -> dict[str, Any]:
    """The contents of config.json. Raises UnsupportedModel or ModelCorrupt with one line."""
    s = Settings(gguf, ARCHITECTURES)
    _refuse_what_we_would_drop(s, gguf)
    num_experts = s.get_or("expert_count", 0)
    found = _CLASSES.get((s.arch, num_experts > 0))
    if found is None:
        raise UnsupportedModel(f"{s.path} is {s.arch} with {num_experts} experts, which is unknown")
    class_name, model_type = found
    hidden = s.count("embedding_length")
    heads = s.count("attention.head_count")
    kv_heads = s.get_or("attention.head_count_kv", heads)
    head_dim = s.get_or("attention.key_length", hidden // heads)
    if kv_heads < 1 or head_dim < 1 or heads % kv_heads:
        raise ModelCorrupt(f"{s.path}: {heads} heads over {kv_heads} KV heads; download it again")
    if s.get_or("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{s.path}: values and keys have different head sizes")
    if s.get_or("rope.dimension_count", head_dim) != head_dim:
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
        config["norm_topk_prob"] = s.get_or("expert_weights_norm", True)  # as every runtime does
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
    for key, neutral in _NEUTRAL.items():
        value = s.get(key, float)
        if value is not None and value not in neutral:
            raise UnsupportedModel(f"{s.path}: {s.arch}.{key} = {value} is not supported")
    window = s.get_or("attention.sliding_window", 0)
    context = s.count("context_length")
    if 0 < window < context:
        raise UnsupportedModel(
            f"{s.path} attends through a sliding window of {window} tokens, which is not supported"
        )
