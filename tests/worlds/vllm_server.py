"""A real vLLM (CPU build) with kvweave's connector, started as a user would, and prompts for it.

`make vllm` builds its environment; `KVWEAVE_VLLM` names another one's Python.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from kvweave.demo import PASSAGES
from kvweave.text.prompt import Prompt, lay_out
from kvweave.text.tokenizer import Tokenizer
from worlds.servers import free_port

REPO = Path(__file__).resolve().parents[2]
START_S = 1500.0  # a compiled model takes minutes on a busy machine
STOP_S = 60.0
MADE_S = 300.0  # chunk KV is made in idle time
TOP = 200  # logprobs that are compared
CONTEXT = 4096
RANKS = "--tensor-parallel-size"  # which divide the cores among them


def vllm_python() -> Path:
    """Never skipped: `make test-vllm` is there to run this."""
    python = Path(os.environ.get("KVWEAVE_VLLM", REPO / ".venv-vllm/bin/python"))
    if not python.is_file():
        raise RuntimeError(f"{python} is not there; make vllm builds it")
    return python


class Reply(NamedTuple):
    """The first token of an answer, its neighbours, and what the connector says."""

    text: str
    tokens: list[int]
    top: dict[int, float]  # logprobs of the first token, by token id
    told: dict[str, Any]  # what the connector did
    cached: int  # prompt tokens that vLLM did not compute


class VllmServer:
    """A running server. Close it."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        extra: Mapping[str, Any],
        *args: str,
        cores: Sequence[int] | None = None,
        port: int | None = None,
        connector: str = "KvweaveConnector",
        python: Path | None = None,
    ) -> None:
        """`extra` are settings of the connector. `cores` None is the last one: one waits for no
        other, and on a busy machine that is faster than two. `port` None is a free one; `python`
        None that of our own environment."""
        folder.mkdir(parents=True, exist_ok=True)
        num_ranks = int(args[args.index(RANKS) + 1]) if RANKS in args else 1
        self.log = folder / "vllm.log"
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        transfer = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(extra),
        }
        command = [str(python or vllm_python()), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "m", "--dtype", "float32"]
        command += ["--max-model-len", str(CONTEXT), "--max-logprobs", str(TOP)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--enable-prompt-tokens-details"]
        command += ["--kv-transfer-config", json.dumps(transfer), *args]
        with self.log.open("w") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_environment(folder, cores or usable_cores()[-num_ranks:], num_ranks),
                cwd=folder,
                start_new_session=True,
            )
        self.http = httpx.Client(base_url=self.url, timeout=600.0)
        try:
            self._wait_for_health()
        except BaseException:
            self.close()
            raise

    def ask(
        self,
        ids: Sequence[int],
        wish: Mapping[str, Any] | None = None,
        max_tokens: int = 2,
        **fields: Any,
    ) -> Reply:
        """Complete a prompt greedily; `wish` goes to the connector. What became of a prompt is
        told with answers of two tokens or more."""
        body: dict[str, Any] = {
            "model": "m",
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": TOP,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
            **fields,
        }
        if wish is not None:
            body["kv_transfer_params"] = {"kvweave": dict(wish)}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, f"{answer.text}\n{self.tail()}"
        reply = answer.json()
        choice = reply["choices"][0]
        top = choice["logprobs"]["top_logprobs"][0]
        details = reply["usage"].get("prompt_tokens_details") or {}
        return Reply(
            choice["text"],
            [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]],
            {int(name.removeprefix("token_id:")): value for name, value in top.items()},
            (reply.get("kv_transfer_params") or {}).get("kvweave", {}),
            details.get("cached_tokens") or 0,
        )

    def counted(self, series: str, **labels: str) -> float:
        """The sum of a counter of its /metrics page over all lines with these labels."""
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        lines = self.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(series)]
        return sum(float(line.split()[-1]) for line in found if all(w in line for w in wanted))

    def kill(self) -> None:
        """As the power is cut: all of its processes at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def tail(self) -> str:
        return self.log.read_text()[-4000:]

    def close(self) -> None:
        self.http.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_for_health(self) -> None:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            if self._process.poll() is not None:
                raise StartFailed(self.log.read_text())
            with suppress(httpx.TransportError):
                if self.http.get("/health").status_code == 200:
                    return
            time.sleep(0.5)
        raise StartFailed(f"not healthy after {START_S:.0f} s\n{self.tail()}")


def ask_until(
    vllm: VllmServer, prompt: Prompt, is_right: Callable[[Reply], bool], **wish: Any
) -> Reply:
    """Ask until chunk KV that is made in idle time is there."""
    until_s = time.monotonic() + MADE_S
    while True:
        reply = vllm.ask(prompt.token_ids, wish_of(prompt, **wish), cache_salt=str(time.time()))
        if is_right(reply) or time.monotonic() > until_s:
            return reply
        time.sleep(0.5)


class StartFailed(Exception):
    """vLLM did not start; its log."""


@contextmanager
def running_vllm(
    folder: Path, model: Path, extra: Mapping[str, Any] | None = None, *args: str
) -> Iterator[VllmServer]:
    """A server whose model is not compiled, unless `args` say otherwise; chunk KV in `folder`.
    `weave` where neither `extra` nor a request names another strategy: it never declines."""
    settings = {"disk_folder": str(folder / "kv"), "codec": "raw", "making": "never"}
    settings["reuse"] = "weave"
    flags = args or ("--enforce-eager",)
    server = VllmServer(folder, model, {**settings, **(extra or {})}, *flags)
    try:
        yield server
    finally:
        server.close()


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _environment(folder: Path, cores: Sequence[int], num_ranks: int) -> dict[str, str]:
    names = list(map(str, cores))
    share = max(1, len(names) // num_ranks)
    bind = "|".join(",".join(names[i * share :][:share]) for i in range(num_ranks))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KVWEAVE_", "VLLM_"))}
    return {
        **kept,
        "PYTHONPATH": str(REPO / "src"),
        "KVWEAVE_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": str(share),
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def valley_chunks(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Passages of the demo, as token ids."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(PASSAGES.glob("*.md"))]
    return [tuple(tokenizer.encode_text(text.strip() + "\n\n")) for text in texts]


def valley_prompt(tokenizer: Tokenizer, question: str, order: Sequence[int]) -> Prompt:
    chunks = valley_chunks(tokenizer)
    return lay_out(tokenizer, question, [chunks[i] for i in order])


def wish_of(prompt: Prompt, **more: Any) -> dict[str, Any]:
    """What a client sends with such a prompt."""
    at, spans = len(prompt.preamble), []
    for chunk in prompt.chunks:
        spans.append([at, at + len(chunk)])
        at += len(chunk)
    asked = [at + prompt.asked[0], at + prompt.asked[1]]
    return {"chunks": spans, "asked": asked, **more}


def apart(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """How far two sets of logprobs lie apart, at most, where both have one; at least half must."""
    shared = one.keys() & other.keys()
    assert len(shared) >= min(len(one), len(other)) // 2, "other tokens altogether"
    return max(abs(one[token] - other[token]) for token in shared)
