"""Compiles rows.c and what it includes for this CPU, once, and finds it again.

    <home>/native/<source, flags, OpenMP, CPU>.so

The file ends with a checksum of what stands before it (a loader of shared objects does not mind):
one that was cut short or changed is compiled anew instead of ending the process. It is written
under another name first, so that two processes may compile at once. A folder that cannot be
written costs the compiler's seconds at every start.

Torch has an OpenMP with threads of its own. What is compiled here is linked to that one and to no
other: a second one in a process would have its own threads, and the two would wait for each other.
"""

import errno
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from kvweave import child_process
from kvweave.child_process import make_child_environment

SOURCE = Path(__file__).with_name("rows.c")
COMPILERS = ("cc", "gcc", "clang")
TIMEOUT_S = 120.0
_SUM_BYTES = 16
stages = logging.getLogger("kvweave.stages")  # what a server does before it is ready
_OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.so")


class BuildError(Exception):
    """There is nothing to load; one line that says why, and the way out."""


def build(folder: Path, openmp: Path | None) -> Path:
    """The compiled file in `folder`: found there, or compiled now. Any number of processes.

    `openmp` is the library to link to; None: one thread. Raises BuildError; an OSError where the
    folder cannot be written, or others may write it.
    """
    flags = _flags(openmp)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _close_to_others(folder)
    path = folder / f"{_name(flags, openmp)}.so"
    if is_whole(path):
        return path
    with tempfile.TemporaryDirectory(dir=folder.absolute(), prefix=".new-") as scratch:
        made = _compile(Path(scratch), flags, openmp)
        body = made.read_bytes()
        made.write_bytes(body + _checksum(body))
        made.chmod(0o755)
        made.replace(path)
    return path


def _close_to_others(folder: Path) -> None:
    """Take the right to write into the folder from others: who has it can put another file into
    the place of one that was checked. Raises PermissionError where the folder is not ours."""
    about = folder.stat()
    is_sticky = bool(about.st_mode & stat.S_ISVTX)  # others cannot replace what is ours in it
    if about.st_uid in (0, os.getuid()) and (is_sticky or not about.st_mode & 0o022):
        return
    if about.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "others may write it", str(folder))
    folder.chmod(stat.S_IMODE(about.st_mode) & ~0o022)


def is_whole(path: Path) -> bool:
    """Whether the file is what was compiled, by us or by the system's owner."""
    try:
        held, about = path.read_bytes(), path.stat()
    except OSError:
        return False
    is_ours = about.st_uid in (0, os.getuid()) and not about.st_mode & 0o022
    body, checksum = held[:-_SUM_BYTES], held[-_SUM_BYTES:]
    return is_ours and _checksum(body) == checksum


def torch_openmp() -> Path | None:
    """The OpenMP that torch runs on, as it is loaded in this process. None: it cannot be told."""
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    loaded = {fields[5] for line in mapped if len(fields := line.split(None, 5)) == 6}
    found = sorted(path for path in loaded if _OPENMP.search(os.path.basename(path)))
    beside = str(Path(torch.__file__).parents[1] / "torch")  # torch/lib/… or torch.libs/…
    own = [path for path in found if path.startswith(beside)] or found
    return Path(own[0]) if len(own) == 1 else None


def _flags(openmp: Path | None) -> tuple[str, ...]:
    # compilers halve the vectors of AVX-512 for code that uses them now and then: not this
    by_cpu = {
        "x86_64": ("-march=native", "-mprefer-vector-width=512"),
        "aarch64": ("-mcpu=native",),
    }
    threads = () if openmp is None else ("-fopenmp",)
    # nothing here looks at errno or at floating-point exceptions; nan stays nan
    plain = ("-fno-math-errno", "-fno-trapping-math")
    return ("-O3", "-std=gnu11", "-fPIC", *plain, *by_cpu.get(platform.machine(), ()), *threads)


def _name(flags: tuple[str, ...], openmp: Path | None) -> str:
    """By all that the compiled file depends on."""
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    parts = (*(path.read_text() for path in sources), " ".join(flags), str(openmp), _cpu())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _cpu() -> str:
    """What `native` stands for here."""
    told = [platform.machine(), platform.processor()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = ("model name", "flags", "CPU implementer", "CPU part", "Features")
        told += dict.fromkeys(line for line in lines if line.startswith(names))
    return "\n".join(told)


def _compile(scratch: Path, flags: tuple[str, ...], openmp: Path | None) -> Path:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError("there is no C compiler here; install one (such as the package gcc)")
    stages.info("compiling kernels for this CPU, once")
    made, linked = scratch / "rows.o", scratch / "rows.so"
    _run([compiler, *flags, "-c", str(SOURCE), "-o", str(made)])
    # linked without -fopenmp, which would bring the compiler's own library
    libraries = ["-lm"] if openmp is None else [str(openmp), "-lm"]
    _run([compiler, "-shared", str(made), "-o", str(linked), *libraries])
    return linked


def _run(command: list[str]) -> None:
    try:
        # no shell; the words are ours, the compiler is the one on the user's path
        done = subprocess.run(  # noqa: S603
            command,
            env=make_child_environment(*child_process.COMPILERS),
            cwd=child_process.FOLDER,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
        said = (lines or done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise BuildError(
            f"{command[0]} failed: {said}; install a C compiler such as gcc 9 or newer"
        )


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_SUM_BYTES).digest()
