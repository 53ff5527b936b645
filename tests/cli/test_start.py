"""A server that starts answers at once: /healthz is alive, all else says which stage it is in."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from openai import OpenAI

from kvweave.model.files.embedded import EMBEDDED, peek
from kvweave.model.files.model_cache import ModelCache, link_or_copy
from worlds.interrupted import sigint
from worlds.servers import free_port
from worlds.serving import user
from worlds.tool_models import make_tool_model_folder

MOST_S = 2.0  # that a probe may wait
START_S = 240.0  # of a start on a busy machine


class Starting(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    errors: Path  # what it writes to stderr


@contextmanager
def starting(folder: Path, *args: object) -> Iterator[Starting]:
    """A command that has just been started, with a home of its own."""
    port, errors = free_port(), folder / "stderr"
    command = [sys.executable, "-m", "kvweave", args[0], "--port", port, *args[1:]]
    env = {**os.environ, "KVWEAVE_HOME": str(folder / "home")}
    with sigint(signal.default_int_handler), errors.open("w") as told:
        process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.DEVNULL, stderr=told, text=True, env=env
        )
    try:
        yield Starting(process, f"http://127.0.0.1:{port}", errors)
    finally:
        process.kill()
        process.wait()


def first_reply(start: Starting, path: str) -> httpx.Response:
    """Once the port is taken."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            return httpx.get(f"{start.url}{path}", timeout=MOST_S)
        except httpx.ConnectError:
            assert start.process.poll() is None, start.errors.read_text()
            time.sleep(0.02)
    raise AssertionError("nobody listens")


def wait_for_nobody(start: Starting) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{start.url}/healthz", timeout=10)
        except httpx.TransportError:
            return
    raise AssertionError("somebody still answers")


def watch_start(start: Starting) -> list[str]:
    """Probe until the server is ready, no probe for longer than MOST_S; the stages, in order."""
    stages: list[str] = []
    assert first_reply(start, "/healthz").status_code == 200
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert start.process.poll() is None, start.errors.read_text()
        assert httpx.get(f"{start.url}/healthz", timeout=MOST_S).status_code == 200
        reply = httpx.get(f"{start.url}/readyz", timeout=MOST_S)
        if reply.status_code == 200:
            return stages
        assert reply.status_code == 503
        assert int(reply.headers["Retry-After"]) >= 1
        message = reply.json()["error"]["message"]
        if message not in stages:
            stages.append(message)
        time.sleep(0.1)
    raise AssertionError(f"not ready: {stages[-1:]}")


def fresh_home(folder: Path, model: str) -> None:
    """Nothing in it but the model: no compiled kernels, no profile of this machine."""
    cached = peek(EMBEDDED[model], ModelCache())
    assert cached is not None, f"{model} is not on this machine; run: make models"
    models = folder / "home" / "models"
    models.mkdir(parents=True)
    shutil.copytree(
        cached.path,
        models / cached.path.name,
        copy_function=lambda old, new: link_or_copy(Path(old), Path(new)),
    )


@pytest.mark.parametrize("quant", ["none", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_first_start_answers_probes_at_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    fresh_home(tmp_path, "smollm2")
    monkeypatch.delenv("KVWEAVE_NATIVE", raising=False)  # other tests share what is compiled
    with starting(tmp_path, "serve", "--model", "smollm2", "--quant", quant) as start:
        stages = "\n".join(watch_start(start))
        told = start.errors.read_text()
    assert "the server is starting: loading libraries; try again" in stages
    assert "compiling kernels for this CPU" in stages
    for words in ("compiling kernels for this CPU", "loading weights, 50 %"):
        assert told.count(f"kvweave: {words}") == 1
    if quant == "auto":  # else weights may be loaded between two probes
        assert re.search(r"loading weights, \d+ %", stages)


def test_other_paths_are_a_503_with_the_stage_and_bodies_do_not_hide_it(
    tmp_path: Path, chat_model_folder: Path
) -> None:
    with starting(tmp_path, "serve", "--model", chat_model_folder) as start:
        page = first_reply(start, "/")
        assert page.status_code == 503
        assert page.headers["Refresh"], "a browser looks again by itself"
        upload = {"title": "long", "text": "word " * 200_000}
        sent = httpx.post(f"{start.url}/v1/kb/notes/documents", json=upload, timeout=10)
        assert sent.status_code == 503
        assert int(sent.headers["Retry-After"]) >= 1
        error = sent.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "starting")
        assert "the server is starting: " in error["message"]


def test_a_schema_and_a_required_tool_are_answered_at_once_after_a_start(tmp_path: Path) -> None:
    """The client is told to try again until the model is there."""
    pytest.importorskip("llguidance", reason="make serve installs it")
    model = make_tool_model_folder(tmp_path / "model")
    point = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    schema = {**point, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    body: dict[str, Any] = {"model": model.name, "messages": user("?"), "max_tokens": 64}
    with starting(tmp_path, "serve", "--model", model) as start:
        assert first_reply(start, "/v1/models").status_code == 503
        url = f"{start.url}/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=40, timeout=60) as client:
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            answer = client.chat.completions.create(**body, response_format=form)  # type: ignore[call-overload]
            assert json.loads(answer.choices[0].message.content).keys() == {"x"}
            called = client.chat.completions.create(  # type: ignore[call-overload]
                **body, tools=[tool], tool_choice="required"
            )
            (call,) = called.choices[0].message.tool_calls
            assert call.function.name == "look"
            assert json.loads(call.function.arguments).keys() == {"x"}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_ended_while_it_starts_leaves_nobody_on_its_port(
    tmp_path: Path, chat_model_folder: Path, how: signal.Signals
) -> None:
    with starting(tmp_path, "serve", "--model", chat_model_folder) as start:
        assert first_reply(start, "/readyz").status_code == 503
        start.process.send_signal(how)
        assert start.process.wait(60) != 0
        wait_for_nobody(start)


def test_a_model_that_does_not_load_is_one_line_and_leaves_nobody_on_its_port(
    tmp_path: Path,
) -> None:
    with starting(tmp_path, "serve", "--model", "no-such") as start:
        assert start.process.wait(START_S) == 2
        told = start.errors.read_text()
        assert told.startswith("kvweave: no model 'no-such'")
        assert told.count("\n") == 1
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{start.url}/healthz", timeout=10)


def test_a_gateway_that_waits_for_an_upstream_is_alive_and_says_so(tmp_path: Path) -> None:
    with starting(tmp_path, "gateway", "--upstream", f"http://127.0.0.1:{free_port()}") as start:
        assert first_reply(start, "/healthz").json()["status"] == "ok"
        deadline = time.monotonic() + START_S
        while (
            "waiting for an upstream to answer"
            not in (reply := httpx.get(f"{start.url}/readyz", timeout=MOST_S)).text
        ):
            assert reply.status_code == 503
            assert time.monotonic() < deadline
            time.sleep(0.1)
