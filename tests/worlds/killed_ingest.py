"""An ingest that kills itself, the hard way, after a given number of Python events.

Counting calls and returns (of C functions too) instead of waiting some milliseconds makes every
moment reachable: inside a transaction, between write and rename, between two documents.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvweave.ingest import IngestOptions, ingest, window
from kvweave.text.tokenizer import Tokenizer
from worlds.tiny_corpus import make_folder, open_kb


def run(kb_folder: Path, tokenizer: Tokenizer, docs: Path) -> None:
    """Small windows, so that a few documents pass through every state there is."""
    window.WINDOW, window.SLICE = 4, 3
    with open_kb(kb_folder, tokenizer) as kb:
        ingest(kb, [docs], options=IngestOptions(prune=True))


def count_events(action: Callable[[], None]) -> int:
    """How many events `action` takes when nothing stops it."""
    num_events = 0

    def count(*_: Any) -> None:
        nonlocal num_events
        num_events += 1

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return num_events


def run_and_die(kb_folder: Path, tokenizer_folder: Path, docs: Path, after_events: int) -> None:
    """The target of a child process."""
    tokenizer = Tokenizer(tokenizer_folder)
    with tempfile.TemporaryDirectory() as folder:  # first-time imports are not what we count
        run(Path(folder) / "kb", tokenizer, make_folder(Path(folder) / "docs", 1))
    left = after_events

    def count(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    run(kb_folder, tokenizer, docs)
    sys.setprofile(None)
