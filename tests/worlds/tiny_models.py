"""Tiny seeded models of every family, made by transformers and saved as a folder."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MOE = {"num_experts_per_tok": 2, "num_local_experts": 4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name → (model type, what differs from SHAPE)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mixtral": ("mixtral", {**MOE, "sliding_window": None}),
    "qwen3_moe": (
        "qwen3_moe",
        {**MOE, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "qwen3_moe-mixed": (
        "qwen3_moe",
        {**MOE, "num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
}


def make_model_folder(root: Path, variant: str, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of `variant`; weights are wide enough that errors would show."""
    model_type, differs = VARIANTS[variant]
    config = AutoConfig.for_model(model_type, **{**SHAPE, **differs, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.3)
    folder = root / variant
    model.save_pretrained(folder)
    return folder


def reference_logits(folder: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> Any:
    """Logits [T, V] of one full forward in transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT_TEXT = """The quick brown fox jumps over the lazy dog. Drain the node, then restart it.
Question: how do I drain a node? Answer: system user assistant. You answer questions from the
passages you are given. Be brief and exact. Größe, naïve, 東京, 😀 and 👩‍🚀."""


def make_tokenizer_files(folder: Path, text: str = CHAT_TEXT, vocab_size: int = 400) -> Tokenizer:
    """Train a byte-level BPE on `text` and write it with a ChatML template."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator([text] * 2, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return fast


def make_chat_model_folder(root: Path, seed: int = 0, **changes: Any) -> Path:
    """A tiny random llama that one can talk to. It babbles, but the same way each time."""
    vocab_size = make_tokenizer_files(root / "llama").get_vocab_size()
    ids = {"bos_token_id": 0, "eos_token_id": 2}
    settings = {"vocab_size": vocab_size, "max_position_embeddings": 512, **ids, **changes}
    return make_model_folder(root, "llama", seed, **settings)
