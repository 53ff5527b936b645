"""Permissions that bite. Root reads and writes whatever they say, unless it gives that up."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_VERSION = 0x20080522  # of the structures of capset(2)
_OVERRIDE = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def plain_user() -> Iterator[None]:
    """This thread, and those it starts meanwhile, keep to permissions. Files stay root's own."""
    if os.geteuid() != 0:
        yield
        return
    header, had = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    _must(libc.capget(header, had))
    less = (ctypes.c_uint32 * 6)(*had)
    less[0] &= ~_OVERRIDE & 0xFFFFFFFF  # effective; what is permitted stays, to come back to
    _must(libc.capset(header, less))
    try:
        yield
    finally:
        _must(libc.capset(header, had))


@contextmanager
def closed_folder(folder: Path) -> Iterator[None]:
    """Nobody may look into it, for as long as this lasts. For a `plain_user`."""
    before = folder.stat().st_mode
    folder.chmod(0o000)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            folder.chmod(before)


def _must(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), "capabilities cannot be changed")
