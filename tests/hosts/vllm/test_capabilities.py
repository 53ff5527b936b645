"""What is refused at start, by name. The configuration is vLLM's own shape, filled in by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvweave.errors import ConfigError
from kvweave.hosts.vllm.capabilities import cache_complaints, config_complaints, refuse


def config(cache_dtype: str = "auto", dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    model = SimpleNamespace(
        architectures=["Qwen2ForCausalLM"],
        is_multimodal_model=False,
        runner_type="generate",
        dtype=dtype,
    )
    fields: dict[str, Any] = {
        "parallel_config": SimpleNamespace(tensor_parallel_size=1),
        "model_config": model,
        "cache_config": SimpleNamespace(cache_dtype=cache_dtype),
        "lora_config": None,
        "speculative_config": None,
    }
    return SimpleNamespace(**{**fields, **more})


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16"])
def test_a_plain_configuration_is_taken(cache_dtype: str) -> None:
    assert config_complaints(config(cache_dtype)) == []
    assert config_complaints(config(cache_dtype, lora_config=object())) == []


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2", "int8_per_token_head", "float16"])
def test_a_kv_cache_of_another_dtype_is_refused_by_name(cache_dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"{cache_dtype}.*--kv-cache-dtype at auto"):
        refuse(config_complaints(config(cache_dtype)))


def test_ranks_that_share_heads_are_taken_and_adapters_with_them_refused() -> None:
    parallel = SimpleNamespace(tensor_parallel_size=2)
    assert config_complaints(config(parallel_config=parallel)) == []
    with pytest.raises(ConfigError, match="--enable-lora with tensor_parallel_size"):
        refuse(config_complaints(config(parallel_config=parallel, lora_config=object())))


def test_weights_that_bring_an_fp8_cache_along_are_refused_by_name() -> None:
    def layers(*kept: torch.dtype) -> list[Any]:
        return [SimpleNamespace(attn=SimpleNamespace(kv_cache_torch_dtype=each)) for each in kept]

    assert cache_complaints(layers(torch.bfloat16, torch.bfloat16), torch.bfloat16) == []
    (words,) = cache_complaints(layers(torch.bfloat16, torch.float8_e4m3fn), torch.bfloat16)
    assert "float8_e4m3fn; say --kv-cache-dtype bfloat16" in words


def test_all_complaints_stand_in_one_line() -> None:
    parallel = SimpleNamespace(tensor_parallel_size=4, pipeline_parallel_size=2)
    speculative = SimpleNamespace(method="eagle")
    every = config("fp8", parallel_config=parallel, speculative_config=speculative)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is 2.*fp8.*draft") as found:
        refuse(config_complaints(every))
    assert "\n" not in str(found.value)
