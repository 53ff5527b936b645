"""`kvweave gateway` as people start it, or why not."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from worlds.running import Run
from worlds.serving import make_weave, serving, user


@contextmanager
def started(*args: object) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    command = [sys.executable, "-m", "kvweave", "gateway", "--port", "0", *map(str, args)]
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
            yield process, lines
        finally:
            process.kill()


def test_it_greets_answers_and_stops_in_order(
    chat_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path))
    with (
        make_weave(chat_model_folder) as weave,
        serving(weave) as engine,
        started("--upstream", engine, "--tokenizer", chat_model_folder) as (process, lines),
    ):
        address = re.search(r"http://127\.0\.0\.1:\d+", lines[0])
        assert address is not None
        assert lines[0].startswith("kvweave serves tiny at ")
        assert lines[3] == "1 upstream, prompts go as token ids; chunk KV is reused there"
        body = {"messages": user("Hi"), "max_tokens": 3, "temperature": 0}
        reply = httpx.post(f"{address[0]}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "")
        assert "stopped" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "no upstream is named; give --upstream URL"),
        (("--upstream", "ftp://x"), "is no address; write http://HOST:PORT"),
        (("--upstream", "http://a/v1", "--upstream", "http://a"), "named twice"),
        (
            ("--upstream", "http://a", "--upstream-key-file", "no-such"),
            "cannot read the upstreams'",
        ),
    ],
)
def test_what_cannot_be_is_one_line(run: Run, args: tuple[str, ...], words: str) -> None:
    ran = run("gateway", *args)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert ran.err.count("\n") == 1
