"""What the docs say about fields and options is what the program has."""

import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvweave.cli import COMMANDS
from kvweave.cli.bench import read_table
from kvweave.config import known_keys
from kvweave.engine.config import EngineConfig
from kvweave.serve.wire.chat import ChatRequest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "bench" / "README.md"]
NO_SETTINGS = {"HOME", "API_KEYS", "API_KEY", "NATIVE", "CONFIG", "URL", "COMPLETE"}
# what Kubernetes sets by itself; examples of names that are not there
NOT_OURS = {"SERVICE_HOST", "PORT", "SECTION_KEY"}
NOT_KEPT = {"build/sbom.json", "kv/demand.json", "bench/NAME.py", "bench/NAME/run.py"}  # made


def first_column(text: str) -> set[str]:
    """Everything in `code` in the first column of a page's tables."""
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}


def test_the_server_page_has_every_request_field() -> None:
    fields = set(ChatRequest.model_fields)
    page = (DOCS / "server.md").read_text()
    section = page.split("## Fields of a chat request")[1].split("\n## ")[0]
    assert first_column(section) == fields


def test_the_engine_page_has_every_setting() -> None:
    names = {field.name for field in fields(EngineConfig)}
    assert first_column((DOCS / "engine.md").read_text()) == names | {"EngineConfig"}


@pytest.mark.parametrize(
    "name", ["ask", "calibrate", "calibrate layers", "gateway", "ingest", "plan", "serve"]
)
def test_the_command_page_has_every_option(name: str) -> None:
    name, *below = name.split()
    command = importlib.import_module(COMMANDS[name]).command
    for each in below:
        command = command.commands[each]
    options = {o for p in command.params for o in [*p.opts, *p.secondary_opts] if o[0] == "-"}
    assert options <= first_column((DOCS / "cli.md").read_text())


def test_the_command_page_has_every_command() -> None:
    headings = re.findall(r"^## `kvweave (\w+)`", (DOCS / "cli.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(COMMANDS)


def test_every_result_that_a_page_names_is_there() -> None:
    """A figure whose file is gone, or was never committed, is nobody's word."""
    root = DOCS.parent
    pages = [*DOCS.glob("*.md"), root / "README.md"]
    named = {
        (page.name, name)
        for page in pages
        for name in re.findall(r"[a-z0-9_.-]+-(?:cpu|h200)\.(?:json|svg|txt)", page.read_text())
    }
    assert len(named) > 10
    kept = {path.name for path in (root / "bench" / "results").iterdir()}
    assert {(page, name) for page, name in named if name not in kept} == set()


def test_tests_that_a_page_names_are_there() -> None:
    """What holds a promise is named beside it."""
    there = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = {
        name for page in DOCS.glob("*.md") for name in re.findall(r"`(test_\w+)`", page.read_text())
    }
    assert named
    assert named <= there, named - there


def names_on(page: Path, pattern: str) -> set[str]:
    return set(re.findall(pattern, page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_and_variables_that_a_page_names_are_there(page: Path) -> None:
    """A changelog is of other days."""
    if page.name == "CHANGELOG.md":
        return
    keys = {str(key) for key in known_keys()}
    sections = "|".join({key.partition(".")[0] for key in keys})
    files = {"model.gguf", "model.safetensors"}
    assert names_on(page, rf"`((?:{sections})\.[a-z_0-9]+)[` =]") <= keys | files
    variables = {key.upper().replace(".", "_") for key in keys} | NO_SETTINGS | NOT_OURS
    assert names_on(page, r"\bKVWEAVE_([A-Z0-9_]+[A-Z0-9])") <= variables | {"MODEL"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_source_files_that_a_page_names_are_there(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    named = names_on(page, r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|c|h|json|yaml|sh|toml|js))`") - NOT_KEPT
    ui = ROOT / "src/kvweave/serve/ui/static"
    package = ROOT / "src/kvweave"
    roots = (ROOT, ROOT / "bench", ROOT / "src", package, package / "kernels", ui)
    assert {name for name in named if not any((root / name).is_file() for root in roots)} == set()


def test_benches_that_a_page_runs_by_name_are_in_the_table() -> None:
    named = {name for page in PAGES for name in names_on(page, r"kvweave bench run ([\w-]+)")}
    assert named
    assert named - {"NAME"} <= read_table().keys()
