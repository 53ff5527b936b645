"""Compiled once, found again, never in the way: what happens where that does not go well."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvweave.errors import ConfigError
from kvweave.kernels.native import build as building
from kvweave.kernels.native import loading
from kvweave.kernels.native.build import BuildError, build, is_whole, torch_openmp
from kvweave.kernels.native.loading import native_kernels, open_library

needs_compiler = pytest.mark.skipif(
    native_kernels().library is None, reason="there is no C compiler here"
)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As a process that has loaded nothing yet, with a home of its own."""
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path))
    monkeypatch.delenv(loading.VARIABLE)
    monkeypatch.setattr(loading, "_loaded", None)
    return tmp_path


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled in a hurry: what matters here is the file."""
    plain = building._flags
    monkeypatch.setattr(
        building, "_flags", lambda openmp: tuple(f for f in plain(openmp) if f != "-O3")
    )


def make_compiler(folder: Path, script: str) -> None:
    """A `cc` in front of all others."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = folder / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)


@needs_compiler
@pytest.mark.usefixtures("hasty")
def test_it_is_compiled_once_and_found_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_library(fresh / "native")
    (made,) = (fresh / "native").iterdir()
    monkeypatch.setattr(building, "COMPILERS", ())  # a later start needs none
    assert open_library(fresh / "native").name == first.name == made.stem


@needs_compiler
@pytest.mark.parametrize("keep", [0, 100, -1])
@pytest.mark.usefixtures("hasty")
def test_a_file_that_was_cut_short_or_changed_is_compiled_anew(tmp_path: Path, keep: int) -> None:
    path = build(tmp_path, torch_openmp())
    whole = path.read_bytes()
    path.unlink()  # not written over: this process may have it loaded
    path.write_bytes(whole[:keep] if keep >= 0 else whole[:5000] + b"x" + whole[5001:])
    assert not is_whole(path)
    assert is_whole(build(tmp_path, torch_openmp()))


@needs_compiler
@pytest.mark.usefixtures("hasty")
def test_a_file_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    path = build(tmp_path, torch_openmp())
    path.chmod(0o777)
    assert not is_whole(path)
    assert is_whole(build(tmp_path, torch_openmp()))


@needs_compiler
@pytest.mark.usefixtures("hasty")
def test_a_folder_that_others_may_write_is_closed_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    folder.chmod(0o777)
    assert is_whole(build(folder, torch_openmp()))
    assert folder.stat().st_mode & 0o777 == 0o755


@needs_compiler
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.usefixtures("hasty")
def test_a_folder_of_somebody_else_costs_a_compilation_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "native"
    path = build(folder, torch_openmp())
    assert folder.stat().st_mode & 0o777 == 0o700
    os.chown(folder, 12345, 12345)
    with pytest.raises(PermissionError, match="others may write it"):
        build(folder, torch_openmp())
    assert open_library(folder).name == path.stem
    assert list(folder.iterdir()) == [path]


@needs_compiler
def test_several_processes_may_compile_at_once(tmp_path: Path) -> None:
    script = (  # in a hurry, as `hasty` has it in this process
        "import sys; from pathlib import Path\n"
        "from kvweave.kernels.native import build\n"
        "from kvweave.kernels.native.loading import open_library\n"
        "plain = build._flags\n"
        "build._flags = lambda openmp: tuple(f for f in plain(openmp) if f != '-O3')\n"
        "print(open_library(Path(sys.argv[1])).name)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "native")]
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(subprocess.run, command, capture_output=True) for _ in range(3)]
        done = [run.result() for run in runs]
    assert [run.returncode for run in done] == [0, 0, 0], done
    assert len({run.stdout for run in done}) == 1
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".so"]


@needs_compiler
@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_costs_a_compilation_and_nothing_else(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o500)
    assert open_library(tmp_path / "native").kind


@needs_compiler
@pytest.mark.usefixtures("hasty")
def test_a_home_that_is_a_file_costs_a_compilation_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "native").write_text("in the way")
    assert open_library(tmp_path / "native").kind


def test_without_a_compiler_one_line_says_so(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            library, words = native_kernels()
    assert library is None
    assert "no C compiler" in words
    assert "install" in words
    assert [record.getMessage() for record in caplog.records] == [words]


def test_a_compiler_that_fails_is_one_line_too(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_compiler(fresh / "bin", "echo 'rows.c:1: error: no such flag' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{fresh / 'bin'}:{os.environ['PATH']}")
    with caplog.at_level(logging.WARNING):
        library, words = native_kernels()
    assert library is None
    assert "no such flag" in words
    assert len(caplog.records) == 1


@needs_compiler
@pytest.mark.usefixtures("hasty")
def test_what_multiplies_wrongly_is_not_taken(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for path in building.SOURCE.parent.glob("*.[ch]"):
        (wrong / path.name).write_text(path.read_text())
    product = wrong / "product.h"
    source = product.read_text()
    assert "float done[PANEL];" in source
    product.write_text(source.replace("float done[PANEL];", "float done[PANEL]; row_scale *= 2;"))
    monkeypatch.setattr(building, "SOURCE", wrong / "rows.c")
    library, words = native_kernels()
    assert library is None
    assert "wrongly" in words


@needs_compiler
@pytest.mark.usefixtures("hasty")
def test_without_torchs_openmp_one_thread_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "torch_openmp", lambda: None)
    assert not open_library(tmp_path).threads
    monkeypatch.setattr(loading, "torch_openmp", lambda: tmp_path / "libgomp.so.9")  # not there
    assert not open_library(tmp_path).threads


@needs_compiler
def test_it_runs_on_torchs_openmp_and_brings_no_other() -> None:
    script = (
        "import re, torch\n"
        "from pathlib import Path\n"
        "torch.set_num_threads(2)\n"
        "def loaded(): return {p for p in re.findall(r'\\S+lib[gi]?omp\\S*', "
        "Path('/proc/self/maps').read_text())}\n"
        "before = loaded()\n"
        "from kvweave.kernels.native.loading import native_kernels\n"
        "assert native_kernels().library.threads\n"
        "assert loaded() == before, loaded()\n"
    )
    if torch_openmp() is None:
        pytest.skip("torch has no OpenMP here")
    subprocess.run([sys.executable, "-c", script], check=True)


def test_it_can_be_turned_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loading.VARIABLE, "0")
    assert native_kernels().library is None
    assert loading.VARIABLE in native_kernels().words
    assert not (fresh / "native").exists()
    monkeypatch.setenv(loading.VARIABLE, "off")
    with pytest.raises(ConfigError, match="neither 0 nor 1"):
        native_kernels()


@needs_compiler
@pytest.mark.usefixtures("hasty")
def test_they_are_kept_where_the_user_says(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loading.VARIABLE, str(fresh / "elsewhere"))
    assert native_kernels().library is not None
    assert [path.suffix for path in (fresh / "elsewhere").iterdir()] == [".so"]
    assert not (fresh / "native").exists()


@needs_compiler
@pytest.mark.parametrize("flags", [("-march=haswell",), ("-DKVW_PLAIN",)])
def test_other_cpus_of_this_kind_compute_the_same(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The roads of x86-64 CPUs without VNNI, and of any CPU; checked when it is opened."""
    if "haswell" in flags[0] and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("not on this CPU")
    plain = building._flags

    def other(openmp: Path | None) -> tuple[str, ...]:
        return (*(flag for flag in plain(openmp) if not flag.startswith("-m")), *flags)

    monkeypatch.setattr(building, "_flags", other)
    library = open_library(tmp_path)
    assert library.kind == ("plain C" if "PLAIN" in flags[0] else "AVX2")


def test_a_build_error_is_no_error_of_the_user() -> None:
    assert not issubclass(BuildError, ConfigError)
