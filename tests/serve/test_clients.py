"""Clients as people have them, unmodified: the examples run against a real server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worlds.serving import KbServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, kb_server: KbServer, *args: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), "--base-url", f"{kb_server.url}/v1"]
    ran = subprocess.run(
        [*command, "--max-tokens", "6", *args],
        capture_output=True,
        timeout=120,
        env={**os.environ, "LANGSMITH_TRACING": "false"},
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout.decode(errors="replace")


def test_the_official_client_runs(kb_server: KbServer) -> None:
    said = run_example("openai_client.py", kb_server)
    for part in ("serving tiny", "reply: ", "stream: ", "from documents: "):
        assert part in said


def test_langchain_runs(kb_server: KbServer) -> None:
    said = run_example("langchain_chat.py", kb_server, "--model", "tiny")
    for part in ("reply: ", "stream: ", "from documents: "):
        assert part in said
    assert " + 6" in said  # output tokens: usage arrives too


def test_llamaindex_runs(kb_server: KbServer) -> None:
    pytest.importorskip("llama_index.llms.openai_like", reason="make test installs it")
    said = run_example("llamaindex_llm.py", kb_server, "--model", "tiny")
    for part in ("complete: ", "chat: ", "stream: ", "from documents: "):
        assert part in said


def test_a_knowledge_base_is_filled_searched_and_asked(kb_server: KbServer) -> None:
    said = run_example("knowledge_base.py", kb_server)
    assert "found: Zorbs" in said
    assert "'reused': " in said
    assert "'reused': 0" not in said
