"""GGUF files for tests, written by the `gguf` package from tiny models that transformers made.

Names and layouts come from that package and from the published conversion rule, not from our code,
so reading them back is a test of our code.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 320
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog while it's raining and we're waiting",
    "a kv cache keeps keys and values of tokens that the model has seen before",
    "numbers like 12 345 and 2026 appear, and so do words like naïve, café and 日本語",
] * 4


@cache
def trained_bpe() -> tuple[list[str], list[str]]:
    """Tokens in id order and merges of a byte-level BPE."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(CORPUS, trainer)
    vocab = fast.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    assert len(tokens) == VOCAB_SIZE
    merges = json.loads(fast.to_str())["model"]["merges"]
    return tokens, [" ".join(pair) for pair in merges]


def bpe_metadata(pre: str = "gpt-2") -> dict[str, Any]:
    tokens, merges = trained_bpe()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIALS else 1 for t in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def config_metadata(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """The decoder's settings under GGUF's names."""
    rope = config.get("rope_parameters") or {}
    facts: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        facts["rope.scaling.type"] = rope["rope_type"]
        facts["rope.scaling.factor"] = float(rope["factor"])
    if rope.get("rope_type") == "yarn":
        original = rope["original_max_position_embeddings"]
        facts["rope.scaling.original_context_length"] = original
    experts = config.get("num_local_experts") or config.get("num_experts")
    if config["model_type"] in ("mixtral", "qwen3_moe"):
        facts["expert_count"] = experts
        facts["expert_used_count"] = config["num_experts_per_tok"]
    if config["model_type"] == "qwen3_moe":
        facts["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return {f"{arch}.{key}": value for key, value in facts.items()}


def gguf_tensors(folder: Path, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The folder's weights under GGUF's names and in its row order."""
    arch = ARCHS[config["model_type"]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    stacks: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    plain: dict[str, np.ndarray] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert:
            stacks[name.replace(expert[0], ".experts.")][int(expert[1])] = weight
        else:
            plain[name] = weight
    plain |= {name: np.stack([s[i] for i in range(len(s))]) for name, s in stacks.items()}
    tensors = {}
    for name, weight in plain.items():
        if arch is gguf.MODEL_ARCH.LLAMA and re.search(r"\.[qk]_proj\.", name):
            key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            weight = permute(weight, config[key])
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        tensors[new_name] = weight
    return tensors


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of Llama in GGUF: the two halves of a head interleaved."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    arch: str = "llama",
    quant: gguf.GGMLQuantizationType | None = None,
    drop: Collection[str] = (),
) -> Path:
    """Write a file. With `quant`, matrices whose rows fit its blocks are quantised."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if key not in drop:
            _add(writer, key, value)
    for name, weight in tensors.items():
        if name in drop:
            continue
        if quant is not None and weight.ndim > 1 and weight.shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quantize(weight, quant), raw_dtype=quant)
        else:
            writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def gguf_of(path: Path, folder: Path, pre: str = "gpt-2", **options: Any) -> Path:
    """A complete GGUF file of a tiny model folder. `metadata=` adds or replaces settings."""
    config = json.loads((folder / "config.json").read_text())
    arch = gguf.MODEL_ARCH_NAMES[ARCHS[config["model_type"]]]
    metadata = config_metadata(config, arch) | bpe_metadata(pre) | options.pop("metadata", {})
    tensors = gguf_tensors(folder, config) | options.pop("tensors", {})
    return write_gguf(path, metadata, tensors, arch, **options)
