"""vLLM's CPU build beside kvweave: the same prompts, token for token, with its prefix cache on.

`make vllm` builds its environment. It serves the folder that kvweave's own model lies in, in
float32 as kvweave does on a CPU. A request with a salt of its own finds nothing cached: that is
vLLM's cold prefill.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvweave.model.files.locate import locate
from kvweave.text.prompt import Document, build_prompt, lay_out, past_messages
from kvweave.text.tokenizer import Tokenizer
from product_parts.servers import RunningServer, ServerProcess, free_port, wait_for_health
from product_parts.workloads import Hits, Search, Step

START_S = 1800.0  # the first start compiles: 2 minutes on two idle cores, 10 on busy ones
KV_GIB = 2
CONTEXT = 8192


def find_vllm(venv: Path) -> tuple[Path | None, str]:
    """The environment's Python, or None and why there is none."""
    python = venv / "bin" / "python"
    if not python.is_file():
        return None, f"vLLM is left out: {venv.name} has no bin/python; make vllm builds it"
    if not any(venv.glob("lib/python*/site-packages/vllm/__init__.py")):
        return None, f"vLLM is left out: it is not installed in {venv.name}; make vllm does that"
    return python, ""


def start_vllm(
    python: Path, model: str, folder: Path, copies: int = 0, match: int = 0
) -> RunningServer:
    """The OpenAI server of vLLM, once it is healthy: minutes, since it compiles. It drafts `copies`
    tokens behind a match of up to `match`; 0: none."""
    threads = len(os.sched_getaffinity(0))
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    env = {
        **kept,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
    }
    env.pop("PYTHONPATH", None)
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(locate(model)), "--served-model-name", model]
    command += ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--enable-prefix-caching"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    if copies:
        drafts = {"method": "ngram", "num_speculative_tokens": copies, "prompt_lookup_max": match}
        command += ["--speculative-config", json.dumps(drafts)]
    process = ServerProcess("vllm", command, env, folder / "vllm.log", folder)
    server = RunningServer(process, f"http://127.0.0.1:{port}")
    wait_for_health(server, START_S)
    return server


class PromptIds:
    """Token ids of a step's prompt, laid out as kvweave does without a conversation's name: the
    messages, then the chunks, then the question."""

    def __init__(self, tokenizer: Tokenizer, search: Search) -> None:
        self._tokenizer = tokenizer
        self._search = search

    def of(self, step: Step) -> list[int]:
        tokenizer, question = self._tokenizer, step.messages[-1]["content"]
        if step.documents is not None:
            documents = [Document(d["text"], d["title"]) for d in step.documents]
            return build_prompt(tokenizer, question, documents).token_ids
        if step.kb is None:
            return tokenizer.encode_chat(step.messages)
        hits = self._search(step.kb, question)
        history = past_messages(step.messages[:-1])
        return lay_out(tokenizer, question, self._chunks(hits), history=history).token_ids

    def _chunks(self, hits: Hits) -> Sequence[tuple[int, ...]]:
        """The ids of chunks that a search returned."""
        chunks = [tuple(self._tokenizer.encode_text(hit["text"])) for hit in hits]
        assert [len(ids) for ids in chunks] == [hit["tokens"] for hit in hits], "other ids"
        return chunks


def salted(salt: str) -> dict[str, Any]:
    """Fields of a request that shares cached prefixes with those of the same salt alone."""
    return {"cache_salt": salt}
