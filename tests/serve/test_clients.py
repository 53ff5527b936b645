"""Clients as people have them, unmodified: the examples run against a real server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.serving import KbServer, make_libraries, serving
from worlds.tool_models import TellingDecoder, make_tool_model_folder
from worlds.weaves import plain_weave

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, url: str, *args: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), "--base-url", f"{url}/v1"]
    ran = subprocess.run(
        [*command, "--max-tokens", "6", *args],
        capture_output=True,
        timeout=120,
        env={**os.environ, "LANGSMITH_TRACING": "false"},
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout.decode(errors="replace")


def test_the_official_client_runs(kb_server: KbServer) -> None:
    said = run_example("openai_client.py", kb_server.url)
    for part in ("serving tiny", "reply: ", "stream: ", "from documents: "):
        assert part in said


def test_langchain_runs(kb_server: KbServer) -> None:
    said = run_example("langchain_chat.py", kb_server.url, "--model", "tiny")
    for part in ("reply: ", "stream: ", "from documents: "):
        assert part in said
    assert " + 6" in said  # output tokens: usage arrives too


def test_llamaindex_runs(kb_server: KbServer) -> None:
    pytest.importorskip("llama_index.llms.openai_like", reason="make test installs it")
    said = run_example("llamaindex_llm.py", kb_server.url, "--model", "tiny")
    for part in ("complete: ", "chat: ", "stream: ", "from documents: "):
        assert part in said


def test_a_knowledge_base_is_filled_searched_and_asked(kb_server: KbServer) -> None:
    said = run_example("knowledge_base.py", kb_server.url)
    assert "found: Zorbs" in said
    assert "'reused': " in said
    assert "'reused': 0" not in said


def test_an_agent_searches_by_a_tool_and_reads_what_it_found(tmp_path: Path) -> None:
    folder = make_tool_model_folder(tmp_path / "model")
    decoder = TellingDecoder(load_decoder(folder, device="cpu"), Tokenizer(folder))
    call = {"name": "search_notes", "arguments": {"query": "zorb"}}
    decoder.tell(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    with plain_weave(decoder, decoder.tokenizer) as weave:
        libraries = make_libraries(weave, tmp_path / "kbs")
        with serving(weave, libraries=libraries) as url:
            said = run_example("agent_loop.py", url, "--max-tokens", "60")
        libraries.close()
    assert "searches for 'zorb'" in said
    assert "turn 2: " in said
    first, second = (
        int(line.split(",")[0].split()[2]) for line in said.splitlines() if "turn" in line
    )
    assert second > first, "what was found is in the prompt"
    assert "answer: " in said


def test_the_notebook_on_the_dial_runs_from_top_to_bottom(kb_server: KbServer) -> None:
    notebook = json.loads((EXAMPLES / "dial.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(not c.get("outputs") for c in notebook["cells"]), "no machine's figures in it"
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)],
        capture_output=True,
        timeout=120,
        env={**os.environ, "KVWEAVE_URL": kb_server.url},
    )
    assert ran.returncode == 0, ran.stderr.decode()
    said = ran.stdout.decode()
    for name in ("exact", "auto", "50 %", "15 %", "fastest", "way 0: KL 0.0000", "way 2: KL"):
        assert name in said, said
