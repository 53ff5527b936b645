"""The compiled kernels of this process: made when first asked for, or a line that says why not."""

import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

from kvweave import paths
from kvweave.errors import ConfigError
from kvweave.kernels.native.build import BuildError, build, torch_openmp
from kvweave.kernels.native.library import CompiledLibrary
from kvweave.kernels.native.product import check

log = logging.getLogger(__name__)

# 0: torch's operators alone; 1, or not set: where they can be had; a folder: they are kept there
VARIABLE = "KVWEAVE_NATIVE"


class NativeKernels(NamedTuple):
    """What this process has."""

    library: CompiledLibrary | None
    words: str  # what it is, or why it is not there and the way out; one line


_TURNED_OFF = NativeKernels(None, f"no compiled kernels: {VARIABLE} is 0")
_lock = threading.Lock()
_loaded: NativeKernels | None = None


def native_kernels() -> NativeKernels:
    """Compiled, loaded and checked once per process. Any thread. What is missing is logged once.

    Raises ConfigError where KVWEAVE_NATIVE is neither 0 nor 1 nor the whole path of a folder.
    """
    global _loaded
    if not _are_wished():
        return _TURNED_OFF
    with _lock:
        if _loaded is None:
            _loaded = _load(_folder())
            if _loaded.library is None:
                log.warning("%s", _loaded.words)
        return _loaded


def kernels_so_far() -> NativeKernels | None:
    """What `native_kernels` found, if somebody asked in this process. Takes no time."""
    return _loaded if _are_wished() else _TURNED_OFF


def loaded_library() -> CompiledLibrary | None:
    """Return the library of `kernels_so_far`, for operators. Does not look at KVWEAVE_NATIVE
    again."""
    return None if _loaded is None else _loaded.library


def _are_wished() -> bool:
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "0", "1") and not os.path.isabs(wish):
        raise ConfigError(f"{VARIABLE}={wish!r} is neither 0 nor 1 nor the whole path of a folder")
    return wish != "0"


def _folder() -> Path:
    """Where compiled kernels are kept: beside the models, or where the user says."""
    wish = os.environ.get(VARIABLE, "")
    return Path(wish) if os.path.isabs(wish) else paths.home() / "native"


def _load(folder: Path) -> NativeKernels:
    try:
        library = open_library(folder)
    except BuildError as error:
        return NativeKernels(None, f"no compiled kernels, so products are slower: {error}")
    threads = "" if library.threads else ", one thread: torch's OpenMP was not found"
    return NativeKernels(library, f"compiled kernels: {library.kind}{threads}")


def open_library(folder: Path) -> CompiledLibrary:
    """Compile into `folder`, or find it there, load and check. Raises BuildError.

    Where torch's OpenMP is not found or cannot be linked to, one thread works on a call.
    """
    openmp = torch_openmp()
    if openmp is not None:
        try:
            return _open(folder, openmp)
        except BuildError as error:
            log.info("no OpenMP in compiled kernels: %s", error)
    return _open(folder, None)


def _open(folder: Path, openmp: Path | None) -> CompiledLibrary:
    try:
        library = CompiledLibrary(build(folder, openmp), threads=openmp is not None)
    except OSError as error:  # a folder that cannot be written: for this process alone
        log.info("compiled kernels cannot be kept in %s: %s", folder, error.strerror)
        with tempfile.TemporaryDirectory() as scratch:
            library = CompiledLibrary(build(Path(scratch), openmp), threads=openmp is not None)
    check(library)
    return library
