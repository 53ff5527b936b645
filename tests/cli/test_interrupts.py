"""Ctrl-C ends every command at any moment with exit code 130 and one line; no traceback, no abort.

Real processes: what went wrong was a thread inside torch while the interpreter ended.
"""

import signal
import time
from pathlib import Path

import pytest

from kvweave.cli.interrupts import EXIT_CODE, PATIENCE_S
from worlds.interrupted import start

LONG = 300.0  # seconds of computing, far beyond what a test waits for, on a busy machine too
RUN = "kvweave.engine.runner:Runner.run"  # on the engine thread


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"To drain node {i}, cordon the node and evict each pod.")
    return folder


def ask(model: Path, *options: object) -> list[object]:
    return ["ask", "Tell me a story.", "--model", model, "--no-stop-loops", *options]


@pytest.mark.parametrize(
    ("moment", "seconds"),
    [
        ("click", 5.0),  # the first thing that is imported
        ("torch", 5.0),
        ("kvweave.model.load:load_weights", LONG),
        ("kvweave.app.weave:Weave.stream", LONG),
        (RUN, 1.0),
        ("kvweave.engine.sampling:Sampler.choose", 1.0),  # the engine is between prompt and answer
    ],
)
def test_while_ask_is_at_work(chat_model_folder: Path, moment: str, seconds: float) -> None:
    process = start(moment, seconds, ask(chat_model_folder, "--temperature", 1, "--seed", 0))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (EXIT_CODE, "kvweave: interrupted")


def test_while_an_answer_is_written(chat_model_folder: Path) -> None:
    """Many tokens in many steps: the engine thread is anywhere."""
    for wait_s in (0.0, 0.03, 0.1):
        args = ask(chat_model_folder, "--temperature", 1, "--seed", 0, "--max-tokens", 450)
        process = start("kvweave.app.answer.answer_stream:StopMatcher.push", 0.0, args)
        time.sleep(wait_s)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err.strip()) == (EXIT_CODE, "kvweave: interrupted")


@pytest.mark.parametrize(
    ("moment", "options"),
    [
        ("worlds.tiny_corpus:WordEmbedder.embed_passages", []),
        ("kvweave.model.load:load_weights", ["--kv"]),
        ("kvweave.fuse.encode.chunk_pass:ChunkPass.advance", ["--kv", "--encoding", "isolated"]),
    ],
)
def test_while_documents_come_in(
    chat_model_folder: Path, docs: Path, tmp_path: Path, moment: str, options: list[str]
) -> None:
    args = ["ingest", docs, "--kb", tmp_path / "kb", "--model", chat_model_folder, *options]
    process = start(moment, LONG, args)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    last = err.strip().splitlines()[-1]
    assert (process.returncode, last) == (EXIT_CODE, "kvweave: interrupted")
    assert "documents are in, run the same command to go on" in err
    assert "Traceback" not in err


def test_while_a_server_loads(chat_model_folder: Path) -> None:
    args = ["serve", "--port", 0, "--model", chat_model_folder]
    process = start("kvweave.model.load:load_weights", LONG, args)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (EXIT_CODE, "kvweave: interrupted")


def test_a_step_that_takes_long_is_not_waited_for(chat_model_folder: Path) -> None:
    patience_s = PATIENCE_S / 5
    process = start(RUN, LONG, ask(chat_model_folder), patience_s=patience_s)
    process.send_signal(signal.SIGINT)
    began_s = time.monotonic()
    _, err = process.communicate(timeout=LONG / 2)
    assert (process.returncode, err.strip()) == (EXIT_CODE, "kvweave: interrupted, left at once")
    assert time.monotonic() - began_s > patience_s * 0.9


def test_a_second_control_c_leaves_at_once(chat_model_folder: Path) -> None:
    """It would wait for longer than the step takes. Two that come together are one: a third and a
    fourth come where the machine is too busy to hear them apart."""
    process = start(RUN, LONG, ask(chat_model_folder), patience_s=2 * LONG)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None, "the first one waits for the step"
    give_up_s = time.monotonic() + LONG / 2
    while process.poll() is None and time.monotonic() < give_up_s:
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
    process.communicate(timeout=1.0)
    assert process.returncode == EXIT_CODE


def test_a_job_in_the_background_is_left_alone(chat_model_folder: Path) -> None:
    """The shell has it ignored there: Ctrl-C is for what runs in front."""
    process = start(RUN, 1.0, ask(chat_model_folder, "--max-tokens", 2), ignored=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
