"""What the docs say about fields and options is what the program has."""

import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvweave.cli import COMMANDS
from kvweave.engine.config import EngineConfig
from kvweave.serve.wire.chat import ChatRequest

TESTS = Path(__file__).resolve().parent
DOCS = TESTS.parent / "docs"


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
