"""The recipe for a command: one file, one line in COMMANDS."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvweave.cli import COMMANDS
from worlds.running import Run

TOY = '''"""`kvweave toy`: says where it would compute."""

import click

from kvweave.cli.options import model_options, pass_config
from kvweave.config import EffectiveConfig


@click.command()
@click.argument("name")
@model_options
@pass_config
def command(name: str, effective: EffectiveConfig) -> None:
    """Greet NAME."""
    click.echo(f"{name} on {effective.config.model.device}")
'''


def test_a_command_is_one_file_and_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_command.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "toy", "toy_command")
    assert run("toy", "Ada").out == "Ada on auto\n"
    assert run("toy", "Ada", "--device", "cpu").out == "Ada on cpu\n"
    assert re.search(r"^  toy +Greet NAME\.$", run("--help").out, re.MULTILINE)
    assert run("toy").err == "kvweave: Missing argument 'NAME'. Try: kvweave toy --help\n"


def test_no_command_needs_torch_to_say_what_it_does() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from kvweave.cli import cli\n"
        "cli.main(['--help'], prog_name='kvweave')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=os.environ, timeout=60
    )
    assert ran.returncode == 0, ran.stderr.decode()
    assert all(f"\n  {name} " in ran.stdout.decode() for name in COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_given_what_it_needs_to_complete(run: Run, shell: str) -> None:
    script = run("completion", shell).out
    assert "_KVWEAVE_COMPLETE" in script
    assert f"{shell}_complete" in script


def test_commands_and_options_complete(run_alone: Run) -> None:
    asked = {"_KVWEAVE_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    assert run_alone(COMP_WORDS="kvweave me", **asked).out == "plain,measure\n"
    asked["COMP_CWORD"] = "2"
    assert "plain,--max-tokens\n" in run_alone(COMP_WORDS="kvweave ask --max", **asked).out


def test_a_command_without_its_extra_says_which_to_install(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['faiss'] = None\n"
        "sys.argv = ['kvweave', 'toy']\n"
        "from kvweave.cli import COMMANDS, main\n"
        "COMMANDS['toy'] = 'toy_faiss'\n"
        "main()\n"
    )
    (tmp_path / "toy_faiss.py").write_text(
        "import click\n\n@click.command()\ndef command():\n    import faiss\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr.decode() == "kvweave: faiss not found; run: pip install 'kvweave[rag]'\n"
