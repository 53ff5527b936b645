"""Running the command line, in this process or as its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kvweave.cli import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`kvweave …` in this process, through the real entry point."""

    def run(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["kvweave", *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return Ran(exit_.value.code, out, err)

    return run


@pytest.fixture
def run_alone() -> Run:
    """`kvweave …` as a process of its own."""

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
