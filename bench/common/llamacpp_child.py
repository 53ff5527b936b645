"""Prefill and decode of llama.cpp on one GGUF file, in its own environment (`make llamacpp`).

Called by bench/prefill.py; prints one JSON line with tokens per second. Imports nothing of kvweave.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

if TYPE_CHECKING:
    import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="of the prompt that is prefilled")
    parser.add_argument("--context", type=int, required=True, help="tokens before decoding")
    parser.add_argument("--steps", type=int, required=True, help="tokens to decode")
    parser.add_argument("--repeats", type=int, required=True)
    args = parser.parse_args()
    import xllamacpp  # in its own environment alone

    params = xllamacpp.CommonParams()
    params.model.path = args.gguf
    params.n_ctx = args.tokens + args.steps + 64
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.verbosity = -1
    server = xllamacpp.Server(params)
    prefill, decode = [], []
    for nth in range(args.repeats + 1):
        # the same ids as nobody's text: what they are does not change the time
        long = [[(7 * i + nth) % 1000 + 300 for i in range(args.tokens)], 1, prefill]
        short = [[(5 * i + nth) % 1000 + 300 for i in range(args.context)], args.steps, decode]
        for ids, steps, into in (long, short):
            told = complete(server, ids, steps)["timings"]
            speed = told["prompt_per_second" if into is prefill else "predicted_per_second"]
            if nth:  # the first one warms up
                into.append(speed)
    print(
        json.dumps(
            {
                "version": xllamacpp.__version__ if hasattr(xllamacpp, "__version__") else "",
                "prefill_tok_s": round(statistics.median(prefill), 1),
                "decode_tok_s": round(statistics.median(decode), 1),
            }
        )
    )


def complete(server: "xllamacpp.Server", ids: list[int], steps: int) -> dict:
    """One greedy completion that does not stop early and finds nothing cached."""
    asked = {
        "prompt": ids,
        "n_predict": steps,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    return server.handle_completions(asked)


if __name__ == "__main__":
    main()
