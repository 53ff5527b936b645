"""Runs a program that downloads as a child, which ends when we are interrupted."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvweave.child_process import FOLDER

_POLL_S = 0.2


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    on_poll: Callable[[], None],
) -> int:
    """Exit status of `command`, which names files by whole paths: it does not run in our working
    directory. What it says goes to `log_path`. Blocks.

    `on_poll` is called five times a second on this thread; what it raises ends the child first.
    """
    with log_path.open("wb") as log:
        child = subprocess.Popen(  # noqa: S603 - a fixed command, no shell
            command,
            env=dict(environment),
            cwd=FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            while child.poll() is None:
                time.sleep(_POLL_S)
                on_poll()
        finally:
            if child.poll() is None:  # interrupted: take it along
                child.terminate()
                child.wait()
    return child.returncode


def largest_file(folder: Path, suffix: str = "") -> int:
    """Bytes of the largest file below a folder that a child writes to. Files come and go under our
    feet; a miss counts as nothing."""
    largest = 0
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(suffix):
                try:
                    largest = max(largest, os.stat(os.path.join(place, name)).st_size)
                except FileNotFoundError:
                    continue
    return largest
