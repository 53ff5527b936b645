"""What transformers makes of a shape of `kvweave.model.shapes`, to compare with."""

import torch

from kvweave.model.spec import ModelSpec


def eager_seconds(spec: ModelSpec, device: torch.device, ids: list[list[int]]) -> list[float]:
    """What transformers' own model of this shape takes for each prompt, sdpa attention, best of 3.

    The next token's logits alone are computed, as in our prefill.
    """
    import time

    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}
    config = getattr(transformers, f"{names[spec.family]}Config")(
        hidden_size=spec.hidden_dim, intermediate_size=spec.inner_dim,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads, head_dim=spec.head_dim, vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_context, sliding_window=None,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    kind = getattr(transformers, f"{names[spec.family]}ForCausalLM")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = kind(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    took = []
    with torch.inference_mode():
        for prompt in ids:
            times = []
            tokens = torch.tensor([prompt], device=device)
            for _ in range(3):
                torch.cuda.synchronize()
                started_s = time.perf_counter()
                model(tokens, logits_to_keep=1, use_cache=True).logits.argmax().item()
                times.append(time.perf_counter() - started_s)
            took.append(min(times[1:]))
    del model
    torch.cuda.empty_cache()
    return took
