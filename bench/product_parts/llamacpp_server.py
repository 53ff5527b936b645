"""llama.cpp's server beside kvweave: the same prompts, token for token, over the same file.

`make llamacpp` builds its environment. It serves the GGUF that kvweave's own weights were converted
from, by its own 4-bit products, with its prompt cache: what desktop programs around llama.cpp do.
"""

import os
from pathlib import Path

from kvweave.model.files.locate import locate
from product_parts.servers import RunningServer, ServerProcess, free_port, wait_for_health

START_S = 300.0
CONTEXT = 8192
SERVE = """
import sys, threading, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
params.n_ctx, params.n_parallel = int(sys.argv[4]), int(sys.argv[7])
if int(sys.argv[5]):
    kinds = xllamacpp.common_speculative_type
    params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    params.speculative.draft.n_max = int(sys.argv[5])
    params.speculative.ngram_simple.size_m = int(sys.argv[5])
    params.speculative.ngram_simple.size_n = int(sys.argv[6])
server = xllamacpp.Server(params)
threading.Event().wait()
"""


def find_llamacpp(venv: Path, model: str) -> tuple[Path | None, str]:
    """The environment's Python, or None and why there is none."""
    python = venv / "bin" / "python"
    if not any(venv.glob("lib/python*/site-packages/xllamacpp/__init__.py")):
        return None, f"llama.cpp is left out: it is not in {venv.name}; make llamacpp builds that"
    if not (locate(model) / "model.gguf").is_file():
        return None, f"llama.cpp is left out: {model} is no GGUF file"
    return python, ""


def start_llamacpp(
    python: Path, model: str, folder: Path, copies: int = 0, match: int = 0, slots: int = 1
) -> RunningServer:
    """Its OpenAI server, once it is healthy. It drafts up to `copies` tokens behind a `match` of so
    many; 0: none. `slots` requests are answered at a time."""
    port, threads = free_port(), len(os.sched_getaffinity(0))
    command = [str(python), "-c", SERVE, str(locate(model) / "model.gguf")]
    command += list(map(str, (port, threads, CONTEXT, copies, match, slots)))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = ServerProcess("llama.cpp", command, env, folder / "llamacpp.log", folder)
    server = RunningServer(process, f"http://127.0.0.1:{port}")
    wait_for_health(server, START_S)
    return server
