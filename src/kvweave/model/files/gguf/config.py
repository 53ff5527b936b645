"""The config.json of a GGUF file: the same facts under Hugging Face's names.

Anything in the metadata that would change the result and that we do not carry over is refused by
name. A model that silently runs with half its settings is worse than one that does not run.

RoPE: GGUF keeps linear and yarn scaling as metadata. Llama 3's rule is not there: the converter
that made the file bakes its outcome into a tensor, `rope_freqs.weight`, one divisor per frequency.
We find the rule that gives those divisors again and check it number by number.
"""

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvweave.errors import ModelCorrupt, UnsupportedModel
from kvweave.model.files.gguf.file import GGUFFile

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

_DEFAULT_BASE = 10000.0  # what GGUF runtimes assume when the file does not say
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0  # every published Llama 3.x has these two
_LLAMA3_CONTEXTS = (8192, 2048, 4096, 16384, 32768, 65536, 131072)

T = TypeVar("T")


class DecoderMetadata:
    """The metadata of one architecture: `llama.block_count` is `block_count` here.

    Wrong types and lengths are a ModelCorrupt.
    """

    def __init__(self, gguf: GGUFFile, supported: tuple[str, ...]) -> None:
        self.path = gguf.path
        self._metadata = gguf.metadata
        arch = gguf.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise ModelCorrupt(f"{self.path} names no general.architecture; download it again")
        if arch not in supported:
            raise UnsupportedModel(
                f"{self.path} has architecture {arch!r}; supported: {', '.join(supported)}"
            )
        self.arch = arch

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value, or None when the file does not say."""
        value = self._metadata.get(f"{self.arch}.{key}")
        if isinstance(value, list):
            if any(v != value[0] for v in value):
                raise UnsupportedModel(
                    f"{self.path}: {self.arch}.{key} differs from layer to layer"
                )
            value = value[0] if value else None  # one number per layer, all alike
        if value is None:
            return None
        if kind is float and type(value) in (int, float):
            # GGUF keeps float32: 1e-05 must not come back as 9.999999747378752e-06
            value = float(str(np.float32(value)))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelCorrupt(
                f"{self.path}: {self.arch}.{key} is {value!r}, not {kind.__name__}; "
                "download it again"
            )
        return value

    def get_or(self, key: str, default: T) -> T:
        value = self.get(key, type(default))
        return default if value is None else value

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
    s = DecoderMetadata(gguf, ARCHITECTURES)
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
        **_read_rope(gguf, s, head_dim, context),
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


def _refuse_what_we_would_drop(s: DecoderMetadata, gguf: GGUFFile) -> None:
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


def _read_rope(gguf: GGUFFile, s: DecoderMetadata, head_dim: int, context: int) -> dict[str, Any]:
    """`rope_theta` and, where the model scales, `rope_scaling`."""
    theta = s.get_or("rope.freq_base", _DEFAULT_BASE)
    scaling = _scaling_from_metadata(s, context)
    if "rope_freqs.weight" in gguf.tensors:
        baked = _scaling_from_tensor(gguf, theta, head_dim)
        if baked and scaling:
            raise UnsupportedModel(
                f"{gguf.path} scales RoPE twice, by metadata and by rope_freqs.weight"
            )
        scaling = scaling or baked
    return {"rope_theta": theta, **({"rope_scaling": scaling} if scaling else {})}


def _scaling_from_metadata(s: DecoderMetadata, context: int) -> dict[str, Any] | None:
    kind = s.get("rope.scaling.type", str)
    factor = s.get("rope.scaling.factor", float)
    if kind is None:  # the old key, from before there were kinds
        kind, factor = "linear", s.get("rope.scale_linear", float)
    if kind == "none" or factor is None or (kind == "linear" and factor == 1.0):
        return None
    if factor < 1.0:
        raise ModelCorrupt(f"{s.path}: {s.arch}.rope.scaling.factor is {factor}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(
            f"{s.path} scales RoPE by {kind!r}; supported: linear, yarn and Llama 3's rule"
        )
    for key, neutral in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0)):
        if s.get_or(f"rope.scaling.{key}", neutral) != neutral:
            raise UnsupportedModel(f"{s.path}: {s.arch}.rope.scaling.{key} is not supported")
    if s.get_or("rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
        raise UnsupportedModel(
            f"{s.path}: {s.arch}.rope.scaling.yarn_log_multiplier is not supported"
        )
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": s.get_or(
            "rope.scaling.original_context_length", context
        ),
        "beta_fast": s.get_or("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": s.get_or("rope.scaling.yarn_beta_slow", 1.0),
    }


def _scaling_from_tensor(gguf: GGUFFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    info = gguf.tensors["rope_freqs.weight"]
    if info.shape != (head_dim // 2,):
        raise ModelCorrupt(
            f"{gguf.path}: rope_freqs.weight has shape {info.shape}, not {(head_dim // 2,)}; "
            "download it again"
        )
    divisors = gguf.rows(info)[0].astype(np.float64)
    if np.all(divisors == 1.0):
        return None
    factor = round(float(divisors.max()), 4)  # it passed through float32; checked below
    for original in _LLAMA3_CONTEXTS:
        if np.allclose(divisors, _llama3_divisors(theta, head_dim, factor, original), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModel(
        f"{gguf.path}: rope_freqs.weight follows no RoPE rule we know; "
        "pass the model's original folder instead"
    )


def _llama3_divisors(
    theta: float, head_dim: int, factor: float, original: int
) -> npt.NDArray[np.float64]:
    """What Llama 3's rule divides each frequency by: 1 for fast ones, `factor` for slow ones."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = (original / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    blend = np.clip(blend, 0.0, 1.0)  # 1: keep, 0: divide
    result: npt.NDArray[np.float64] = 1.0 / ((1.0 - blend) / factor + blend)
    return result
