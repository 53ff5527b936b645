"""vLLM's models, which let the connector find them.

A connector is handed the KV cache and never the model. The plug-in therefore registers these in the
place of vLLM's own: the same classes, which note themselves when they are made. vLLM reads the
parameters of a model's constructor by name.
"""

import weakref
from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

_MADE: list[weakref.ref[Any]] = []  # in this process; a draft model may be among them


def find_model(attention: Any) -> Any | None:
    """The model whose first layer this attention module is; None: no model noted itself."""
    for each in (ref() for ref in _MADE):
        layers: Any = getattr(getattr(each, "model", None), "layers", ())
        if len(layers) and layers[0].self_attn.attn is attention:
            return each
    return None


class FusedLlama(LlamaForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _MADE.append(weakref.ref(self))


class FusedMistral(MistralForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _MADE.append(weakref.ref(self))


class FusedQwen2(Qwen2ForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _MADE.append(weakref.ref(self))


class FusedQwen3(Qwen3ForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _MADE.append(weakref.ref(self))
