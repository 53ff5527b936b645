"""The line of a request: what its answer took, and nothing of probes."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from kvweave.app.weave import Weave
from kvweave.errors import ConfigError
from kvweave.serve.observe.logs import HumanLines, JsonLines
from kvweave.serve.observe.tracing import wanted_exporter
from kvweave.serve.server import Prepare, ServerLifecycle
from worlds.serving import serving, user


@contextmanager
def logged(formatter: logging.Formatter, level: int = logging.INFO) -> Iterator[list[str]]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler, logger = Keep(), logging.getLogger("kvweave.requests")
    handler.setFormatter(formatter)
    old = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(old)


def line_of(lines: list[str], words: str) -> str:
    """Written once the reply is out."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [line for line in list(lines) if words in line]
        if found:
            return found[0]
        time.sleep(0.01)
    raise AssertionError(f"nothing of {words!r} in {lines}")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_told_with_its_time_tokens_and_strategy(url: str, stream: bool) -> None:
    body = {"messages": user("hello log"), "max_tokens": 3, "temperature": 0, "stream": stream}
    headers = {"x-request-id": f"told-{stream}"}
    with logged(JsonLines()) as lines:
        httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        line: dict[str, Any] = json.loads(line_of(lines, headers["x-request-id"]))
    assert line["completion_tokens"] == 3
    assert line["prompt_tokens"] > 3
    assert 0 < line["ttft_ms"] <= line["ms"]
    assert line["strategy"]
    assert line["cached_tokens"] is not None


def test_people_read_it_too(url: str) -> None:
    body = {"messages": user("hello log"), "max_tokens": 3, "temperature": 0}
    headers = {"x-request-id": "for-people"}
    with logged(HumanLines()) as lines:
        httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        line = line_of(lines, "for-people")
    assert " ms, first " in line
    assert "+3 tokens, " in line


def test_probes_are_written_at_debug_alone(url: str) -> None:
    for path in ("healthz", "readyz", "metrics"):  # the first look is a change of status
        httpx.get(f"{url}/{path}", timeout=60)
    with logged(JsonLines()) as lines:
        for path in ("healthz", "readyz", "metrics"):
            httpx.get(f"{url}/{path}", headers={"x-request-id": "a-probe"}, timeout=60)
        httpx.get(f"{url}/v1/models", headers={"x-request-id": "no-probe"}, timeout=60)
        line_of(lines, "no-probe")
    assert not [line for line in lines if "a-probe" in line]
    with logged(JsonLines(), logging.DEBUG) as lines:
        httpx.get(f"{url}/healthz", headers={"x-request-id": "a-probe"}, timeout=60)
        assert json.loads(line_of(lines, "a-probe"))["level"] == "debug"


def test_of_a_probe_only_a_change_of_its_status_is_written(weave: Weave) -> None:
    gate = threading.Event()
    steps = [Prepare("waiting", lambda: gate.wait(60))]
    with logged(JsonLines()) as lines, serving(weave, lifecycle=ServerLifecycle(steps)) as url:
        for _ in range(3):
            assert httpx.get(f"{url}/readyz", timeout=60).status_code == 503
        gate.set()
        while httpx.get(f"{url}/readyz", timeout=60).status_code == 503:
            pass
        httpx.get(f"{url}/readyz", headers={"x-request-id": "a-probe"}, timeout=60)
        httpx.get(f"{url}/v1/models", headers={"x-request-id": "no-probe"}, timeout=60)
        line_of(lines, "no-probe")
    told = [(line["path"], line["status"]) for line in map(json.loads, lines)]
    assert told == [("/readyz", 503), ("/readyz", 200), ("/v1/models", 200)]


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, None),
        ({"OTEL_SERVICE_NAME": "x"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, None),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_the_variables_say_where_spans_go(env: dict[str, str], wanted: str | None) -> None:
    assert wanted_exporter(env) == wanted


def test_an_exporter_that_is_not_known_is_one_line() -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER=zipkin is not supported; use otlp"):
        wanted_exporter({"OTEL_TRACES_EXPORTER": "zipkin"})


def test_spans_are_made_where_the_variables_ask_for_them() -> None:
    """In a process of its own: a provider is set once."""
    program = (
        "from kvweave.serve.observe.tracing import configure_tracing\n"
        "from kvweave.serve.observe.tracing import find_tracer\n"
        "assert find_tracer() is None\n"
        "configure_tracing(); configure_tracing()\n"
        "with find_tracer().start_as_current_span('a span of ours'): pass\n"
    )
    env = {**os.environ, "OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": ""}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, env=env, timeout=280)
    assert ran.returncode == 0, ran.stderr.decode()
    assert '"name": "a span of ours"' in ran.stdout.decode()
    assert '"service.name": "kvweave"' in ran.stdout.decode()
