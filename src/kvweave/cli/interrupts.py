"""Ctrl-C, at any moment: quiet, quick, exit code 130.

The first one is a KeyboardInterrupt in the main thread, as ever: the command unwinds and closes
what it opened, which stops the engine between two steps and waits for its thread. A second one, or
PATIENCE_S later, leaves at once.

The interpreter must not end while a thread computes: CPython ends a thread that comes back for the
lock then, which unwinds through frames of torch that let nothing through: std::terminate, SIGABRT.
So where threads are still at work after an interrupt, the process leaves without that end.
"""

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import click

EXIT_CODE = 128 + signal.SIGINT
PATIENCE_S = 5.0  # for closing; what is written is safe from a kill at any moment


class Interrupts:
    """Ours is the handler of SIGINT inside the `with`, unless the signal is ignored, as a shell has
    it for a job in the background: such a job is not to be stopped by it. Main thread only."""

    def __init__(self) -> None:
        self.is_interrupted = False  # by a signal
        self._is_ours = False

    def __enter__(self) -> "Interrupts":
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._first)
            self._is_ours = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours and not self.is_interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def leave(self, code: int) -> NoReturn:
        """End the process."""
        if self.is_interrupted and _is_at_work():
            _leave_at_once(code)
        sys.exit(code)

    def _first(self, _signal: int, _frame: FrameType | None) -> None:
        if self.is_interrupted:
            _leave_at_once(EXIT_CODE)
        self.is_interrupted = True
        _watch()
        raise KeyboardInterrupt


def _watch() -> None:
    """Leave when the next signal comes, or after a while. On a thread of its own: the main one may
    be inside a long computation, where no handler runs."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)

    def wait() -> None:
        select.select([heard], [], [], PATIENCE_S)
        click.echo("kvweave: interrupted, left at once", err=True)
        _leave_at_once(EXIT_CODE)

    threading.Thread(target=wait, name=_WATCH, daemon=True).start()


_WATCH = "interrupts"


def _is_at_work() -> bool:
    """Whether threads run that may be computing."""
    idle = (threading.main_thread().name, _WATCH)
    return any(thread.name not in idle for thread in threading.enumerate())


def _leave_at_once(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # nobody may be reading any more
            stream.flush()
    os._exit(code)
