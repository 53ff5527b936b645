"""`kvweave serve` as people start it: a process that greets, answers, stops; or says why not."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from kvweave.cli.serve import make_places, warn_if_open
from kvweave.config import WeaveConfig
from kvweave.reasons import Reason
from worlds.interrupted import sigint
from worlds.running import Run
from worlds.tiny_embedder import make_embedder_folder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NO_MODEL = "smollm2 is not on this machine; run: make models"


@contextmanager
def started(*args: object) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """`kvweave serve …` on a free port: the process, its address and its greeting."""
    command = [sys.executable, "-m", "kvweave", "serve", "--port", "0", *map(str, args)]
    with sigint(signal.default_int_handler):  # also where the tests run in the background
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
        )
    with process:
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
        assert "weights in float32" in lines
        assert not any(word in line for line in lines for word in ("nats", "rows", "prefix"))
        snippet = "\n".join(line.strip() for line in lines[-4:])
        ran = subprocess.run([sys.executable, "-c", snippet], capture_output=True, timeout=120)
        assert ran.returncode == 0, ran.stderr.decode()
        assert ran.stdout.strip()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (128 + signal.SIGINT, "")
        *stages, last = err.splitlines()
        assert last == "stopped"
        assert stages[0] == "kvweave: loading weights, 0 %"
        assert all(line.startswith("kvweave: ") for line in stages)


def test_without_a_flag_uploads_make_knowledge_bases_where_the_greeting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat_model_folder: Path
) -> None:
    embedder = make_embedder_folder(tmp_path / "embedder")
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    args = ["--model", chat_model_folder, "--encoding", "isolated", "--embedder", embedder]
    with started(*args) as (process, address, lines):
        root = tmp_path / "home" / "kbs"
        assert lines[1] == f"knowledge bases: {root} (an upload makes one)"
        assert lines[2] == f"web page: {address.removesuffix('v1')}"
        assert httpx.get(address.removesuffix("v1")).status_code == 200
        assert not root.exists(), "made on demand"
        (upload,) = (line for line in lines if "/documents" in line)
        (tmp_path / "README.md").write_text("# Nodes\n\nTo drain a node, cordon it first.\n")
        ran = subprocess.run(shlex.split(upload), cwd=tmp_path, capture_output=True, timeout=120)
        assert json.loads(ran.stdout)["new_chunks"] == 1, ran.stderr
        assert (root / "notes" / "kb.json").is_file()
        assert [kb["name"] for kb in httpx.get(f"{address}/kb").json()["data"]] == ["notes"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_with_kb_and_no_root_only_those_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path))
    assert make_places(WeaveConfig(), []).root == tmp_path / "kbs"
    assert make_places(WeaveConfig(), [f"notes={tmp_path}"]).root is None
    monkeypatch.delenv("KVWEAVE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert make_places(WeaveConfig(), []).root == tmp_path / "data" / "kvweave" / "kbs"


def test_keys_logs_and_knowledge_bases_as_a_process_and_sigterm_stops_in_order(
    chat_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KVWEAVE_LIBRARY_BACKGROUND_KV", "always")  # the model is not calibrated
    keys = tmp_path / "keys"
    keys.write_text("sk-secret-1:acme\n")
    args = ["--kb-root", tmp_path / "kbs", "--encoding", "isolated", "--log-format", "json"]
    args += ["--api-key-file", keys, "--model", chat_model_folder]
    with started(*args) as (process, address, _):
        headers = {"Authorization": "Bearer sk-secret-1", "x-request-id": "mine"}
        assert httpx.get(f"{address}/models").status_code == 401
        note = {"title": "Drain", "text": "To drain a node, cordon it first."}
        made = httpx.post(f"{address}/kb/a/documents", json=note, headers=headers, timeout=120)
        assert made.json()["new_chunks"] == 1
        deadline = time.monotonic() + 60  # its KV comes by itself
        while time.monotonic() < deadline:
            told = httpx.get(f"{address}/kb/a", headers=headers | {"x-request-id": "x"}).json()
            if told["kv"]["state"] == "ready":
                break
        assert told["kv"]["chunks_done"] == told["kv"]["chunks_total"] == 1
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    *lines, last = err.splitlines()
    assert last == "stopped"
    assert any(line.startswith("kvweave: measuring this machine") for line in lines)
    told_s = [n for n, line in enumerate(lines) if line.startswith("kvweave: measured in ")]
    assert told_s
    logged = [json.loads(line) if line.startswith("{") else {} for line in lines]
    assert not any("status" in line for line in logged[: told_s[0]]), "before it serves"
    assert [line["status"] for line in logged if line.get("request_id") == "mine"] == [200]
    assert "sk-secret-1" not in err
    assert (tmp_path / "kbs" / "@acme" / "a" / "kb.json").is_file()
    assert list((tmp_path / "kbs" / "@acme" / "a" / "kv" / "objects").rglob("*"))


def test_smollm2_answers_through_the_server_and_the_example_runs() -> None:
    """The real embedded model, end to end. `make test` pulls it; without it this must fail."""
    from kvweave.model.files.embedded import EMBEDDED, peek
    from kvweave.model.files.model_cache import ModelCache

    assert peek(EMBEDDED["smollm2"], ModelCache()) is not None, NO_MODEL
    with started("--model", "smollm2") as (_, address, _):
        with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            # leads by two nats at every token: no rounding of any CPU answers otherwise
            question = [{"role": "user", "content": "What is the chemical symbol for water?"}]
            reply = client.chat.completions.create(
                model="smollm2", messages=question, temperature=0, max_tokens=16
            )
            assert "H2O" in reply.choices[0].message.content
            assert reply.choices[0].finish_reason == "stop"
        example = [EXAMPLES / "openai_client.py", "--base-url", address, "--max-tokens", "16"]
        ran = subprocess.run([sys.executable, *example], capture_output=True, timeout=240)
        assert ran.returncode == 0, ran.stderr.decode()
        said = ran.stdout.decode()
        assert "serving smollm2" in said
        assert "H2O" in said
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
        (["--kb", "notes"], "--kb 'notes' names no folder; write NAME=DIR"),
        (["--kb", "a.b=dir"], "'a.b' cannot name a knowledge base"),
        (["--kb", "a=x", "--kb", "a=y"], "--kb a is there twice"),
        (["--api-key-file", "no-such-file"], "cannot read the API keys in no-such-file"),
        (["--running", "0"], "0 is not in the range"),
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


@pytest.mark.parametrize(
    ("host", "has_keys", "warns"),
    [
        ("0.0.0.0", False, True),
        ("0.0.0.0", True, False),
        ("192.168.1.5", False, True),
        ("::", False, True),
        ("127.0.0.1", False, False),
        ("::1", False, False),
        ("localhost", False, False),
    ],
)
def test_a_server_that_lets_everybody_in_says_so(
    capsys: pytest.CaptureFixture[str], host: str, has_keys: bool, warns: bool
) -> None:
    warn_if_open(host, has_keys=has_keys)
    assert ("no API keys" in capsys.readouterr().err) == warns


def test_a_shape_is_served_with_random_weights_and_every_place_says_so(tmp_path: Path) -> None:
    embedder = make_embedder_folder(tmp_path / "embedder")
    where = ("--kb-root", tmp_path / "kbs", "--embedder", embedder)
    with started("--shape", "tiny", *where) as (_, address, lines):
        assert lines[0] == f"kvweave serves random:tiny at {address}"
        assert any("RANDOM weights, for load tests" in line for line in lines)
        model = httpx.get(f"{address}/models").json()["data"][0]
        assert (model["id"], model["note"]) == ("random:tiny", str(Reason.PERMITTED))
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        assert httpx.post(f"{address}/chat/completions", json=body).status_code == 200
        document = {"title": "Zorbs", "text": "A zorb is a small round tool. " * 40}
        uploaded = httpx.post(f"{address}/kb/notes/documents", json=document, timeout=60)
        assert uploaded.status_code == 200, uploaded.text
        kv, give_up_s = {"chunks_done": 0}, time.monotonic() + 60
        while not kv["chunks_done"] and kv.get("state") != "unused":
            assert time.monotonic() < give_up_s, kv
            time.sleep(0.2)
            kv = httpx.get(f"{address}/kb/notes").json()["kv"]
        assert kv["chunks_done"] == kv["chunks_total"], "what is fused by permission is made"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--shape", "tiny", "--model", "smollm2"), "--shape draws random weights, but smollm2"),
        (("--shape", "tiny", "--quant", "int8"), "drop --quant"),
        (("--shape", "huge"), "no shape 'huge'; there are: llama-3.1-8b"),
    ],
)
def test_a_shape_is_refused_beside_a_model(run: Run, args: tuple[str, ...], words: str) -> None:
    assert words in run("serve", "--port", "0", *args).err
