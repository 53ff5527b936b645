"""How long does a newcomer wait: for an answer, for one from own documents, for a fused one?

Clones this repository (what is committed) into a temporary folder, gives it a fresh `KVWEAVE_HOME`
and types what the README says: `make serve`, a chat, an upload of the clone's docs/ folder,
questions about it. Everything is counted from where the person began to wait:

- `first_answer_s`: from `make serve` in a bare clone, with install and model download, to the end
  of the first answer; `ready_s` to /readyz
- `own_documents_s`: from the beginning of the upload to the end of the first answer from it
- `fused_s`: from the beginning of the upload to the end of the first answer in which chunk KV was
  reused, by the default settings. None: never; `why` is what the server says keeps it from it

Then the server is started once more with `library.background_kv = always`, so that chunk KV is made
in the background whatever calibration says:

- `named_s`: from its readiness to the end of the first answer that reuses chunk KV by name
- `chat_ratio`: tokens per second of a chat while chunk KV is made, over those of the same chat when
  all is quiet: 0.8 is a chat slowed by 20 %. `encoded_beside`: chunks that were encoded meanwhile,
  those that questions wanted in front first; `kv_bytes_beside`: what the knowledge base got of them

    python bench/first_minutes.py --out bench/results/first_minutes-cpu.json

`--reuse-env DIR` takes a virtual environment that is there instead of installing, `--reuse-models`
the models of this machine's cache: for quick trials, whose `first_answer_s` is not the newcomer's.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from common.files import REPO
from common.results import finish, result_header
from kvweave.paths import home

CHAT = [{"role": "user", "content": "Tell me a long story about a river, a mill and a ferryman."}]
LOOK_S = 1.0  # between two questions while chunk KV is awaited
NAMED = "weave-through"
CHATS = 3  # the median of so many is a speed
MOST_CHATS = 24  # until a pass over chunks ended beside them


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the server would outlive us
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="first-minutes-")))
        clone = folder / "clone"
        subprocess.run(["git", "clone", "--quiet", REPO, clone], check=True)
        kvweave_home = folder / "home"
        kvweave_home.mkdir()
        if args.reuse_models:
            (kvweave_home / "models").symlink_to(home() / "models")
        began_s = time.perf_counter()
        files = sorted((clone / args.docs).rglob("*.md"))[: args.files]
        with serving(clone, kvweave_home, args) as url:
            wait_until_ready(url, args.patience)
            found: dict[str, Any] = {"ready_s": since(began_s)}
            found["first_answer"] = chat(url, "Say hello in one sentence.")
            found["first_answer_s"] = since(began_s)
            quiet = sorted(decode_speed(url) for _ in range(CHATS))[CHATS // 2]
            found |= own_documents(url, files, args.patience)
        with serving(clone, kvweave_home, args, KVWEAVE_LIBRARY_BACKGROUND_KV="always") as url:
            wait_until_ready(url, args.patience)
            found |= reused_by_name(url, files, args.patience)
            found |= beside_a_chat(url, quiet)
    show(found)
    config = {"docs": args.docs, "files": len(files), "model": args.model}
    config |= {"installed": args.reuse_env is None, "downloaded": not args.reuse_models}
    header = result_header("first_minutes", "cpu")
    finish(__doc__, {**header, "config": config, **found}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", default="docs", help="folder of the clone to upload")
    parser.add_argument("--files", type=int, help="at most so many of it")
    parser.add_argument("--model", help="in place of the default model")
    parser.add_argument("--reuse-env", type=Path, metavar="DIR", help="instead of installing")
    parser.add_argument("--reuse-models", action="store_true", help="instead of downloading")
    parser.add_argument("--patience", type=float, default=1200.0, help="seconds for each wait")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args()


@contextmanager
def serving(
    clone: Path, kvweave_home: Path, args: argparse.Namespace, **settings: str
) -> Iterator[str]:
    """What a newcomer starts, in a process group of its own: make has children."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVWEAVE_", "PYTHONPATH"))}
    env |= {"KVWEAVE_HOME": str(kvweave_home), **settings}
    model = [] if args.model is None else [args.model]
    if args.reuse_env is None:
        command = ["make", "serve", f"PORT={port}", *(f"MODEL={name}" for name in model)]
    else:
        env["PYTHONPATH"] = str(clone / "src")
        command = [str(args.reuse_env.absolute() / "bin" / "python"), "-m", "kvweave", "serve"]
        command += ["--port", str(port), *(f"--model={name}" for name in model)]
    process = subprocess.Popen(
        command, cwd=clone, env=env, stdout=sys.stderr, start_new_session=True
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def since(began_s: float) -> float:
    return round(time.perf_counter() - began_s, 2)


def wait_until_ready(url: str, patience_s: float) -> None:
    give_up_s = time.perf_counter() + patience_s
    while time.perf_counter() < give_up_s:
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"no server at {url} after {patience_s:.0f} s")


def chat(url: str, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 32}
    return str(post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"])


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(url, json=body, timeout=600)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def upload(url: str, kb: str, files: Sequence[Path]) -> None:
    form = [("file", (path.name, path.read_bytes())) for path in files]
    reply = httpx.post(f"{url}/v1/kb/{kb}/documents", files=form, timeout=3600)
    assert reply.status_code == 200, reply.text


def questions(files: Sequence[Path]) -> Iterator[str]:
    """One for each heading, again and again. Each brings other chunks in front: what was asked just
    now is exact, and nothing of it would be fused."""
    text = "\n".join(path.read_text() for path in files)
    headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    return cycle(f"What is said about {heading}?" for heading in headings)


def ask(url: str, kb: str, question: str, reuse: str | None = None) -> dict[str, Any]:
    """A question about what was uploaded; the reply with its explain block."""
    body = {"messages": [{"role": "user", "content": question}], "kb": kb, "explain": True}
    body |= {"max_tokens": 32} | ({} if reuse is None else {"reuse": reuse})
    return post(f"{url}/v1/chat/completions", body)


def own_documents(url: str, files: Sequence[Path], patience_s: float) -> dict[str, Any]:
    began_s = time.perf_counter()
    upload(url, "docs", files)
    found: dict[str, Any] = {"upload_s": since(began_s)}
    asked = questions(files)
    answer = ask(url, "docs", next(asked))
    found["own_documents_s"] = since(began_s)
    found["own_answer"] = answer["choices"][0]["message"]["content"]
    found["fused_s"] = None
    while time.perf_counter() - began_s < patience_s:
        explain = ask(url, "docs", next(asked))["explain"]
        if explain["tokens"].get("reused"):
            found["fused_s"] = since(began_s)
            break
        kv = state_of_kv(url)
        found["why"] = kv["why"] or explain.get("why")
        if kv["state"] in ("unused", "off", "failed"):
            break
        time.sleep(LOOK_S)
    return found


def state_of_kv(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/v1/kb/docs", timeout=60).json()["kv"])


def num_encoded(url: str) -> int:
    """Chunks whose KV was computed since the server started."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    counted = [line for line in lines if line.startswith("kvweave_kv_chunks_encoded_total")]
    return int(sum(float(line.rpartition(" ")[2]) for line in counted))


def reused_by_name(url: str, files: Sequence[Path], patience_s: float) -> dict[str, Any]:
    began_s = time.perf_counter()
    asked = questions(files)
    while time.perf_counter() - began_s < patience_s:
        if ask(url, "docs", next(asked), NAMED)["explain"]["tokens"].get("reused"):
            return {"named_s": since(began_s)}
        time.sleep(LOOK_S)
    return {"named_s": None}


def beside_a_chat(url: str, quiet: float) -> dict[str, Any]:
    """The speed of a chat while chunk KV is made; until some of it was."""
    before, began = state_of_kv(url), num_encoded(url)
    speeds: list[float] = []
    while len(speeds) < CHATS or num_encoded(url) == began:
        assert len(speeds) < MOST_CHATS, f"no chunk KV was made meanwhile: {state_of_kv(url)}"
        speeds.append(decode_speed(url))
    after = state_of_kv(url)
    busy = sorted(speeds)[len(speeds) // 2]
    made = after["bytes"] - before["bytes"]
    return {
        "chat_quiet_tok_s": round(quiet, 2),
        "chat_busy_tok_s": round(busy, 2),
        "chat_ratio": round(busy / quiet, 3),
        "chats_beside": len(speeds),
        "encoded_beside": num_encoded(url) - began,
        "kv_bytes": after["bytes"],
        "kv_bytes_beside": made,
        "kv_eta_s": after["eta_s"],
    }


def decode_speed(url: str) -> float:
    """Tokens per second of a streamed chat, behind its first token."""
    body = {"messages": CHAT, "max_tokens": 64, "stream": True, "temperature": 0}
    body |= {"stream_options": {"include_usage": True}}
    times: list[float] = []
    num_tokens = 0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if usage := event.get("usage"):
                    num_tokens = usage["completion_tokens"]
                if event["choices"] and event["choices"][0]["delta"].get("content"):
                    times.append(time.perf_counter())
    assert len(times) > 1, "a story of one token"
    return (num_tokens - 1) / (times[-1] - times[0])


def show(found: dict[str, Any]) -> None:
    table = Table(title="the first minutes", show_header=False)
    rows = {
        "ready_s": "server ready",
        "first_answer_s": "first answer",
        "upload_s": "documents uploaded",
        "own_documents_s": "first answer from own documents, since the upload began",
        "named_s": "first answer that reuses chunk KV by name, in the background",
        "fused_s": "first that does by default settings",
    }
    for name, words in rows.items():
        table.add_row(words, "not yet" if found[name] is None else f"{found[name]:.1f} s")
    if found["fused_s"] is None and found.get("why"):
        table.add_row("… because", str(found["why"]))
    table.add_row("chunk KV on disk", f"{found['kv_bytes'] / 1e6:,.0f} MB")
    speeds = f"{found['chat_busy_tok_s']:.1f} of {found['chat_quiet_tok_s']:.1f} tok/s"
    table.add_row("a chat while KV is made", f"{found['chat_ratio']:.2f}× ({speeds})")
    Console().print(table)


if __name__ == "__main__":
    main()
