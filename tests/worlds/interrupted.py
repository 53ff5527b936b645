"""`kvweave …` in a process of its own that says when it has come to a certain moment, and stays
there, computing, so that Ctrl-C can meet it there.

    python -m worlds.interrupted MODULE:NAME SECONDS ARGUMENTS…

At the first call of MODULE:NAME it prints NOW and computes for SECONDS on the calling thread, in
torch, before the call goes on. A MODULE without a NAME is the moment when it is imported.
"""

import importlib
import importlib.abc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
PATIENCE = "INTERRUPTED_PATIENCE_S"  # a variable of the process


@contextmanager
def sigint(action: Any) -> Iterator[None]:
    """Processes that are started meanwhile have this for Ctrl-C. A shell starts background jobs
    with it ignored, and that is handed down; a handler of ours is not, it becomes the default."""
    before = signal.signal(signal.SIGINT, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def start(
    moment: str,
    seconds: float,
    args: Sequence[object],
    *,
    ignored: bool = False,
    patience_s: float | None = None,
) -> subprocess.Popen[str]:
    """The process, once it has come to its moment. `patience_s`: instead of PATIENCE_S."""
    command = [sys.executable, "-m", "worlds.interrupted", moment, seconds, *args]
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    with sigint(signal.SIG_IGN if ignored else signal.default_int_handler):
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                **({} if patience_s is None else {PATIENCE: str(patience_s)}),
            },
        )
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "NOW\n":
        assert line, f"it ended: {process.communicate()[1]}"
    return process


def _compute(seconds: float) -> None:
    import torch

    matrix, end_s = torch.ones(256, 256), time.monotonic() + seconds
    while time.monotonic() < end_s:
        matrix = (matrix @ matrix).clamp_(0, 1)


def _announce() -> None:
    sys.stdout.write("NOW\n")
    sys.stdout.flush()


def _meet_at_call(module: str, name: str, seconds: float) -> None:
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, met = getattr(owner, last), False

    def meet(*args: Any, **kwargs: Any) -> Any:
        nonlocal met
        if not met:
            met = True
            _announce()
            _compute(seconds)
        return original(*args, **kwargs)

    setattr(owner, last, meet)


class _MeetAtImport(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, seconds: float) -> None:
        self._module = module
        self._seconds = seconds

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == self._module:
            self._module = ""
            _announce()
            time.sleep(self._seconds)


def _main() -> None:
    moment, seconds, *args = sys.argv[1:]
    module, _, name = moment.partition(":")
    if name:
        _meet_at_call(module, name, float(seconds))
    else:
        sys.meta_path.insert(0, _MeetAtImport(module, float(seconds)))
    if args[0] == "ingest":  # the embedded one takes seconds to load
        from worlds.tiny_corpus import WordEmbedder

        ingest = importlib.import_module("kvweave.cli.ingest")
        ingest.find_embedder = lambda *_: WordEmbedder()  # type: ignore[attr-defined]
    if PATIENCE in os.environ:
        interrupts = importlib.import_module("kvweave.cli.interrupts")
        interrupts.PATIENCE_S = float(os.environ[PATIENCE])  # type: ignore[attr-defined]
    sys.argv = ["kvweave", *args]
    from kvweave.__main__ import main

    main()


if __name__ == "__main__":
    _main()
