"""`kvweave serve` as people start it: a process that greets, answers, stops; or says why not."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from running import Run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NO_MODEL = "smollm2 is not on this machine; run: make models"


@contextmanager
def started(*args: object) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """`kvweave serve …` on a free port: the process, its address and its greeting."""
    command = [sys.executable, "-m", "kvweave", "serve", "--port", "0", *map(str, args)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not (lines and "print(chat" in lines[-1]):
                line = process.stdout.readline()
                assert line, f"it ended: {process.stderr.read() if process.stderr else ''}"
                lines.append(line.rstrip())
            address = re.search(r"http://127\.0\.0\.1:\d+/v1", lines[0])
            assert address, lines
            yield process, address[0], lines
        finally:
            process.kill()


def test_the_snippet_of_the_greeting_runs_and_control_c_stops(chat_model_folder: Path) -> None:
    with started("--model", chat_model_folder) as (process, address, lines):
        assert lines[0] == f"kvweave serves llama at {address}"
        snippet = "\n".join(line.strip() for line in lines[-4:])
        ran = subprocess.run([sys.executable, "-c", snippet], capture_output=True, timeout=120)
        assert ran.returncode == 0, ran.stderr.decode()
        assert ran.stdout.strip()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "", "stopped\n")


def test_smollm2_answers_through_the_server_and_the_example_runs() -> None:
    """The real embedded model, end to end. `make test` pulls it; without it this must fail."""
    from kvweave.model.embedded import EMBEDDED, peek
    from kvweave.model.shelf import Shelf

    assert peek(EMBEDDED["smollm2"], Shelf()) is not None, NO_MODEL
    with started("--model", "smollm2") as (_, address, _):
        with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            question = [{"role": "user", "content": "What is the capital of France?"}]
            reply = client.chat.completions.create(
                model="smollm2", messages=question, temperature=0, max_tokens=12
            )
            assert "Paris" in reply.choices[0].message.content
            assert reply.choices[0].finish_reason == "stop"
        example = [EXAMPLES / "openai_client.py", "--base-url", address, "--max-tokens", "12"]
        ran = subprocess.run([sys.executable, *example], capture_output=True, timeout=240)
        assert ran.returncode == 0, ran.stderr.decode()
        said = ran.stdout.decode()
        assert "serving smollm2" in said
        assert "Paris" in said
        assert re.search(r"from documents: .*14", said)


def test_a_taken_port_is_one_line_before_anything_loads(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = run("serve", "--port", port, "--model", "no-such")
    says = f"kvweave: cannot listen on 127.0.0.1 port {port}: Address already in use"
    assert ran.code == 2
    assert ran.err.startswith(says)
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--port", "70000"], "70000 is not in the range"),
        (["--port", "-1"], "-1 is not in the range"),
        (["--port", "http"], "'http' is not a valid integer"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--model", "no-such"], "no model 'no-such'"),
    ],
)
def test_what_cannot_be_served_is_one_line(run: Run, args: list[str], says: str) -> None:
    ran = run("serve", *([] if "--port" in args else ["--port", "0"]), *args)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
    assert ran.err.count("\n") == 1


def test_a_missing_extra_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fastapi", "uvicorn"):
        monkeypatch.setitem(sys.modules, name, None)
    ran = run("serve", "--port", "0")
    says = "kvweave: fastapi and uvicorn not found; run: pip install 'kvweave[serve]'\n"
    assert ran == (2, "", says)
