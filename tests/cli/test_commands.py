"""The recipe for a command: one file, one line in COMMANDS."""

import os
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
    assert "toy        Greet NAME." in run("--help").out
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
