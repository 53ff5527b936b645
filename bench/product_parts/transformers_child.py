"""Answers over HTTP by plain transformers: `generate`, one request after the other.

What many people write first, and all of it. bench/product.py --instead starts it on the folder that
kvweave's own model lies in; nothing is kept from one request to the next.
"""

import argparse
import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging


class TextStreamer(BaseStreamer):
    """Hands on the text of each token as it is drawn. `generate` puts the prompt first."""

    def __init__(self, tokenizer: Any, send: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._send = send
        self._is_prompt = True
        self._ids: list[int] = []
        self._sent = ""

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._ids += value.flatten().tolist()
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character
            self._send(text[len(self._sent) :])
            self._sent = text

    def end(self) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    """GET /health and POST /v1/completions with a prompt of token ids, streamed."""

    model: Any
    tokenizer: Any
    turn = threading.Lock()

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        streamer = TextStreamer(self.tokenizer, lambda text: self._send([{"text": text}], None))
        prompt = torch.tensor([body["prompt"]])
        with self.turn, torch.inference_mode():
            self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=body["max_tokens"],
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                repetition_penalty=body.get("repetition_penalty", 1.0),
                streamer=streamer,
            )
        counts = {"prompt_tokens": prompt.shape[1], "completion_tokens": streamer.num_tokens}
        self._send([], counts)
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, choices: list[dict[str, str]], usage: dict[str, int] | None) -> None:
        self.wfile.write(f"data: {json.dumps({'choices': choices, 'usage': usage})}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    Handler.tokenizer = AutoTokenizer.from_pretrained(args.model)
    Handler.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
