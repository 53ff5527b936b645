"""Running the command line, in this process or as its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kvweave.cli import main
from kvweave.config_keys import FILE_VARIABLE, OTHER_VARIABLES


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def use_default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no kvweave.toml and no variable of the person who runs the tests set anything."""
    for name in list(os.environ):
        if name.startswith("KVWEAVE_") and name not in OTHER_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv(FILE_VARIABLE, os.devnull)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`kvweave …` in this process, through the real entry point."""
    use_default_settings(monkeypatch)

    def run(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["kvweave", *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return Ran(exit_.value.code, out, err)

    return run


@pytest.fixture
def run_alone(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`kvweave …` as a process of its own."""
    use_default_settings(monkeypatch)

    def run(*args: object, stdin: bytes = b"", **env: str) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "kvweave", *map(str, args)],
            input=stdin,
            capture_output=True,
            env={**os.environ, **env},
            timeout=120,
        )
        return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run
