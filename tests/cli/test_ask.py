"""`kvweave ask`: answers like the library, and every bad input is one line and exit code 2."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvweave.app.weave import Document, Sampling, Weave
from kvweave.cli.ask import LARGEST_FILE_BYTES
from kvweave.text.prompt import SYSTEM
from worlds.interrupted import sigint
from worlds.running import Ran, Run


def refused(ran: Ran) -> str:
    """The one line of a refusal."""
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.startswith("kvweave: ")
    return ran.err


def test_the_answer_is_the_librarys(run: Run, chat_model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Drain the node.")
    (tmp_path / "b.md").write_text("\ufeffThe quick fox.", encoding="utf-8")
    files = ["--file", tmp_path / "a.txt", "-f", tmp_path / "b.md"]
    ran = run("ask", "how?", *files, "--model", chat_model_folder, "--max-tokens", 12)
    documents = [Document("Drain the node.", "a.txt"), Document("The quick fox.", "b.md")]
    weave = Weave.open(model=str(chat_model_folder))
    answer = weave.ask("how?", documents=documents, sampling=Sampling(max_tokens=12))
    assert (ran.code, ran.out) == (0, answer.text + "\n")
    assert f"{answer.prompt_tokens} prompt + 12 answer tokens · first after" in ran.err
    assert ran.err.count("\n") == 1


def test_every_option_reaches_the_sampler(run: Run, chat_model_folder: Path) -> None:
    options = [
        "--max-tokens",
        "9",
        "--temperature",
        "0.8",
        "--top-p",
        "0.9",
        "--top-k",
        "7",
        "--seed",
        "3",
    ]
    more = ["--repetition-penalty", "1.5", "--stop", "zzz", "--stop", "yyy", "--system", "Be odd."]
    ran = run("ask", "how?", "--model", chat_model_folder, *options, *more, "--no-stats")
    sampling = Sampling(9, 0.8, 0.9, 7, 1.5, 3, ("zzz", "yyy"))
    answer = Weave.open(model=str(chat_model_folder)).ask(
        "how?", sampling=sampling, system="Be odd."
    )
    assert ran == (0, answer.text + "\n", "")
    plain = Weave.open(model=str(chat_model_folder)).ask("how?", sampling=sampling, system=SYSTEM)
    assert plain.text != answer.text


def test_json_is_one_document(run: Run, chat_model_folder: Path) -> None:
    ran = run("ask", "how?", "--model", chat_model_folder, "--max-tokens", 5, "--json")
    said = json.loads(ran.out)
    answer = Weave.open(model=str(chat_model_folder)).ask("how?", sampling=Sampling(max_tokens=5))
    assert (ran.code, ran.err) == (0, "")
    assert said["answer"] == answer.text
    assert said["finish_reason"] == "length"
    assert said["model"] == "llama"
    assert said["usage"]["total_tokens"] == answer.prompt_tokens + 5
    assert said["timing"]["total_ms"] >= said["timing"]["ttft_ms"] > 0


def test_json_names_the_sources(run: Run, chat_model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Drain the node.")
    ran = run(
        *("ask", "how?", "-f", tmp_path / "a.txt", "--model", chat_model_folder),
        *("--max-tokens", 2, "--json"),
    )
    said = json.loads(ran.out)
    (source,) = said["sources"]
    assert (source["title"], source["cited_as"], source["document"]) == ("a.txt", 1, None)
    chunk = said["explain"]["chunks"][0]
    assert source["span"] == [chunk["start"], chunk["start"] + chunk["tokens"]]
    assert source["fate"] == chunk["state"]
    assert said["documents"] == [str(tmp_path / "a.txt")]
    assert said["explain"]["order"] == "auto, says the configuration"
    assert said["full_ms"] is None or said["full_ms"] > 0


def test_a_history_is_what_was_said_before(
    run: Run, chat_model_folder: Path, tmp_path: Path
) -> None:
    said = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}]
    (tmp_path / "said.json").write_text(json.dumps(said))
    typed = ("ask", "how?", "--model", chat_model_folder, "--max-tokens", 4, "--json")
    ran = run(*typed, "--history", tmp_path / "said.json")
    weave = Weave.open(model=str(chat_model_folder))
    answer = weave.ask("how?", history=said, sampling=Sampling(max_tokens=4))
    told = json.loads(ran.out)
    assert (told["answer"], told["query"]) == (answer.text, None)
    assert told["usage"]["prompt_tokens"] == answer.prompt_tokens
    for text in ("{", '"x"'):
        (tmp_path / "bad.json").write_text(text)
        assert "--history" in refused(run("ask", "q", "--history", tmp_path / "bad.json"))


def test_stdin_is_a_document_and_the_answer_streams_to_a_pipe(
    run_alone: Run, chat_model_folder: Path
) -> None:
    args = ["ask", "how?", "-f", "-", "--model", chat_model_folder, "--max-tokens", 6]
    ran = run_alone(*args, stdin=b"Drain the node.")
    documents = [Document("Drain the node.", "stdin")]
    weave = Weave.open(model=str(chat_model_folder))
    answer = weave.ask("how?", documents=documents, sampling=Sampling(max_tokens=6))
    assert (ran.code, ran.out) == (0, answer.text + "\n")


def test_a_terminal_that_cannot_show_a_character_is_no_crash(
    run_alone: Run, chat_model_folder: Path
) -> None:
    args = ["ask", "how?", "--model", chat_model_folder, "--max-tokens", 12]
    ran = run_alone(*args, PYTHONIOENCODING="ascii")
    assert ran.code == 0
    assert ran.out.isascii()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, "cannot read"),
        ("empty.txt", b" \n", "empty.txt is empty; leave it out"),
        ("binary.bin", b"abc\0def", "binary.bin looks binary; pass a text file"),
        ("latin.txt", "größe".encode("latin-1"), "latin.txt is not UTF-8 text (byte 2)"),
        ("large.txt", b"a" * (LARGEST_FILE_BYTES + 1), "large.txt is larger than 16 MiB"),
    ],
)
def test_a_file_that_is_no_text_is_refused_before_the_model_loads(
    run: Run, tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert says in refused(run("ask", "how?", "-f", tmp_path / name, "--model", "no-such"))


def test_a_folder_is_not_a_file(run: Run, tmp_path: Path) -> None:
    assert "Is a directory" in refused(run("ask", "how?", "-f", tmp_path))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["  "], "the question is empty"),
        (["q", "--temperature", "-1"], "temperature must be between 0 and 100, got -1.0"),
        (["q", "--temperature", "nan"], "temperature must be"),
        (["q", "--temperature", "hot"], "'hot' is not a valid float"),
        (["q", "--top-p", "0"], "top_p must be above 0"),
        (["q", "--top-k", "-2"], "top_k must be 0 (off) or more"),
        (["q", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["q", "--seed", "-1"], "seed must be between"),
        (["q", "--repetition-penalty", "0"], "repetition_penalty must be between"),
        (["q", "--stop", ""], "stop must be made of non-empty strings"),
        (
            ["q", "--model", "no-such"],
            "no model 'no-such'; pass an embedded name (qwen2.5-coder-0.5b",
        ),
        (["q", "--model", "org/no-such"], "the model hub cannot be reached"),
        (["q", "--model", "no/such/folder"], "no model 'no/such/folder'"),
        (["q", "--model", "missing.gguf"], "missing.gguf does not exist"),
        (
            ["q", "--ratio", "0.2"],
            "--ratio takes the stored chunk KV of a knowledge base; add --kb",
        ),
        (["q", "--rewrite"], "--rewrite is about a follow-up; say what was said before: --history"),
        (["q", "--history", "missing.json"], "cannot read 'missing.json'"),
        (["q", "--reuse", "weave"], "--reuse takes the stored chunk KV of a knowledge base"),
        (["q", "--no-such-option"], "--no-such-option"),
        ([], "Missing argument 'QUESTION'. Try: kvweave ask --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(run: Run, args: list[str], says: str) -> None:
    assert says in refused(run("ask", *args))


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--device", "tpu", "device 'tpu' is unknown"),
        ("--dtype", "float8", "dtype 'float8' is unknown"),
        ("--quant", "int3", "quant 'int3' is unknown"),
    ],
)
def test_a_bad_setting_is_one_line(
    run: Run, chat_model_folder: Path, option: str, value: str, says: str
) -> None:
    assert says in refused(run("ask", "q", "--model", chat_model_folder, option, value))


def test_a_prompt_that_does_not_fit_is_one_line(
    run: Run, chat_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text("word " * 2000)
    line = refused(run("ask", "q", "-f", tmp_path / "long.txt", "--model", chat_model_folder))
    assert "the model's context holds 512" in line


def broken_model(folder: Path, to: Path, how: str) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    if how == "architecture":
        config |= {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
        (to / "config.json").write_text(json.dumps(config))
    elif how == "missing tensor":
        from safetensors.torch import load_file, save_file

        tensors = load_file(to / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, to / "model.safetensors")
    elif how == "truncated":
        data = (to / "model.safetensors").read_bytes()
        (to / "model.safetensors").write_bytes(data[:-1000])
    elif how == "tokenizer":
        (to / "tokenizer.json").unlink()
    return to


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("architecture", "mamba"),
        ("missing tensor", "up_proj"),
        ("truncated", "model.safetensors"),
        ("tokenizer", "tokenizer.json"),
    ],
)
def test_a_broken_model_is_one_line(
    run: Run, chat_model_folder: Path, tmp_path: Path, how: str, says: str
) -> None:
    model = broken_model(chat_model_folder, tmp_path / "model", how)
    assert says in refused(run("ask", "q", "--model", model))


def test_a_truncated_gguf_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    assert "cut.gguf" in refused(run("ask", "q", "--model", tmp_path / "cut.gguf"))


def test_the_same_as_a_process(run: Run, run_alone: Run) -> None:
    ran = run_alone("ask", "q", "--model", "no-such")
    assert "no model 'no-such'" in refused(ran)
    assert ran == run("ask", "q", "--model", "no-such"), "so what is told here is told there"
    assert "no-such.txt" in refused(run("ask", "q", "--file", "no-such.txt"))


def test_control_c_is_quiet(tmp_path: Path) -> None:
    """Interrupted while it waits for stdin, which is as good a place as any to be sure of."""
    code = (
        "import sys, threading, os, signal\n"
        "sys.argv = ['kvweave', 'ask', 'q', '-f', '-']\n"
        "class Stdin:\n"
        "    class buffer:\n"
        "        @staticmethod\n"
        "        def read(n): os.kill(os.getpid(), signal.SIGINT); return b''\n"
        "sys.stdin = Stdin\n"
        "from kvweave.cli import main\n"
        "main()\n"
    )
    with sigint(signal.default_int_handler):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, env=os.environ, timeout=120
        )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.decode().strip() == "kvweave: interrupted"


def test_help_loads_no_torch(run_alone: Run) -> None:
    code = "import sys; from kvweave.cli import ask, serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60).returncode == 0
    assert "--file" in run_alone("ask", "--help").out
