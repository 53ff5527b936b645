"""Every process that kvweave starts, from a folder full of traps and with secrets in the air."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from kvweave.child_process import make_child_environment
from kvweave.corpus.parsers.base import ParseLimits
from kvweave.corpus.parsers.parser_process import ParserPool
from kvweave.kernels.native.build import build
from kvweave.model.files.hub_file import HubFile
from kvweave.model.files.sources import Workplace
from kvweave.model.files.wheels import download_wheel
from worlds.hub import running_hub
from worlds.wheels import index, make_wheel

__all__ = ["index"]  # the fixture

SECRETS = {
    "OPENAI_API_KEY": "sk-1",
    "KVWEAVE_API_KEYS": "sk-2",
    "AWS_SECRET_ACCESS_KEY": "sk-3",
    "QDRANT_API_KEY": "sk-4",
    "DATABASE_URL": "postgres://user:sk-5@host/db",
}
TRAPS = ("json", "struct", "select", "csv", "subprocess", "pip", "huggingface_hub", "kvweave")


class Traps:
    """What children did, seen from outside."""

    def __init__(self, folder: Path) -> None:
        self.sprung = folder / "sprung"  # names of modules that ran
        self.seen = folder / "seen"  # variables and working directories of children

    def check(self) -> None:
        assert not self.sprung.exists(), self.sprung.read_text()
        told = self.seen.read_text()
        assert "PATH=" in told
        assert "\ncwd=/\n" in told
        for secret in SECRETS.values():
            assert secret not in told


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traps:
    """Makes a poisoned folder the working directory, sets secrets, and watches how Python starts:
    by a program in front of it, since children are asked nothing."""
    traps, folder = Traps(tmp_path), tmp_path / "poisoned"
    folder.mkdir()
    for name in TRAPS:
        trap = f"open({str(traps.sprung)!r}, 'a').write({name!r} + chr(10))\nraise SystemExit(3)\n"
        (folder / f"{name}.py").write_text(trap)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", "") + os.pathsep)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", str(make_watcher(tmp_path, traps, sys.executable)))
    return traps


def make_watcher(folder: Path, traps: Traps, program: str, name: str = "python") -> Path:
    """A program that notes what it was given and becomes `program`."""
    path = folder / "watched" / name
    path.parent.mkdir(exist_ok=True)
    noted = f'{{ env; echo "cwd=$(pwd)"; }} >> "{traps.seen}"'
    path.write_text(f'#!/bin/sh\n{noted}\nexec "{program}" "$@"\n')
    path.chmod(0o755)
    return path


def test_a_parser_runs_nothing_of_the_working_directory(traps: Traps) -> None:
    pool = ParserPool()
    try:
        (record,) = pool.ask("a.csv", b"name,size\nnode,3\n", ParseLimits(), lambda: None)
    finally:
        pool.close()
    assert "node" in record.text
    traps.check()


def test_a_download_by_pip_runs_nothing_of_the_working_directory(
    traps: Traps, index: Path, tmp_path: Path
) -> None:
    model = make_wheel(index)
    assert download_wheel(f"{model.name}-box=={model.version}", tmp_path / "scratch").is_file()
    traps.check()
    assert f"PIP_FIND_LINKS={index}" in traps.seen.read_text()  # where the user's packages are


def test_a_download_from_the_hub_runs_nothing_of_the_working_directory(
    traps: Traps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    at = Workplace(tmp_path / "kept", tmp_path / "scratch", lambda step: None)
    at.scratch.mkdir()
    with running_hub("some-org/some-model/a.bin", b"bytes") as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        assert HubFile("some-org/some-model", "a.bin", 5).fetch(at).read_bytes() == b"bytes"
    traps.check()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
def test_a_compiler_sees_no_secret_and_not_the_working_directory(
    traps: Traps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("cc")
    assert compiler is not None
    watcher = make_watcher(tmp_path, traps, compiler, "cc")
    monkeypatch.setenv("PATH", str(watcher.parent) + os.pathsep + os.environ["PATH"])
    assert build(tmp_path / "native", None).is_file()
    traps.check()


def test_paths_of_a_child_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", "", "/lib"]))
    monkeypatch.setenv("PIP_FIND_LINKS", "./wheels")
    monkeypatch.setenv("PIPELINE_TOKEN", "secret")
    found = make_child_environment("PIP_")
    assert found["PYTHONPATH"] == os.pathsep.join([str(tmp_path / "src"), "/lib"])
    assert found["PIP_FIND_LINKS"] == str(tmp_path / "wheels")
    assert "PIPELINE_TOKEN" not in found
