"""A vLLM engine in this process: asked by token ids, tokens as they come."""

import asyncio
import itertools
import json
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvweave.model.spec import ModelSpec

END = object()


class Engine:
    """`AsyncLLM` on a loop of its own. Thread-safe; close it."""

    def __init__(self, model: Path, extra: Mapping[str, Any] | None, **settings: Any) -> None:
        """`extra` are settings of the connector; None: a stock vLLM."""
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if extra is not None:
            settings["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KvweaveConnector",
                kv_role="kv_both",
                kv_connector_extra_config=dict(extra),
            )
        made = AsyncEngineArgs(model=str(model), **settings)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._numbers = itertools.count()

        async def start() -> Any:
            return AsyncLLM.from_engine_args(made)

        self._llm = asyncio.run_coroutine_threadsafe(start(), self._loop).result()

    def ask(
        self,
        ids: Sequence[int],
        wish: Mapping[str, Any] | None = None,
        max_tokens: int = 2,
        logprobs: int | None = None,
        salt: str | None = None,
    ) -> Iterator[Any]:
        """vLLM's outputs of a prompt, each with the tokens that are new in it."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if wish is None else {"kv_transfer_params": {"kvweave": dict(wish)}},
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(ids)}
        if salt is not None:
            prompt["cache_salt"] = salt
        outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for each in self._llm.generate(prompt, params, str(next(self._numbers))):
                    outputs.put(each)
                outputs.put(END)
            except BaseException as error:
                outputs.put(error)

        asyncio.run_coroutine_threadsafe(pump(), self._loop)
        while (got := outputs.get()) is not END:
            if isinstance(got, BaseException):
                raise got
            yield got

    def tell(self, *args: Any, **more: Any) -> dict[str, Any]:
        """Ask, and return what the connector did."""
        *_, last = self.ask(*args, **more)
        told = (last.kv_transfer_params or {}).get("kvweave", {})
        return dict(told)

    def close(self) -> None:
        self._llm.shutdown()


def write_model(folder: Path, spec: ModelSpec) -> Path:
    """A folder with the configuration of a llama and nothing that it could say: `dummy` weights,
    and a tokenizer that nobody asks."""
    import numpy as np
    from safetensors.numpy import save_file

    from worlds.tiny_models import make_tokenizer_files

    make_tokenizer_files(folder)
    rope: dict[str, Any] = {"rope_theta": spec.rope.theta}
    if spec.rope.kind == "llama3":
        rope["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": spec.rope.factor,
            "low_freq_factor": spec.rope.low_freq_factor,
            "high_freq_factor": spec.rope.high_freq_factor,
            "original_max_position_embeddings": spec.rope.original_context,
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_dim,
        "intermediate_size": spec.inner_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 2,
        **rope,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"drawn": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder
