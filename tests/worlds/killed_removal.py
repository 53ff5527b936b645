"""Removals that are killed, the hard way, after a given number of Python events.

    python killed_removal.py FOLDER DOCUMENT PART…

Removes DOCUMENT from copies of the knowledge base in FOLDER/kb; the removal from FOLDER/PART dies
when so many percent of the work are done. Prints the exit codes. A process of its own that forks,
because importing torch takes longer than all the rest.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvweave.app.library.kv_sync import remove_with_kv
from kvweave.corpus.knowledge_base import KnowledgeBase


def remove(kb_folder: Path, document: str) -> None:
    with KnowledgeBase.open(kb_folder) as kb:
        remove_with_kv(kb, [found.id for found in kb.find(document)])


def profiled(action: Callable[[], None], die_after: int | None = None) -> int:
    """How many events `action` takes; with `die_after` it takes no more than that."""
    num_events = 0

    def count(*_: Any) -> None:
        nonlocal num_events
        num_events += 1
        if num_events == die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return num_events


def main(folder: Path, document: str, parts: list[str]) -> None:
    shutil.copytree(folder / "kb", folder / "warm")
    remove(folder / "warm", document)  # what happens the first time only is not what we count
    num_events = profiled(partial(remove, folder / "kb", document))
    for part in parts:
        child = os.fork()
        if child == 0:
            profiled(partial(remove, folder / part, document), num_events * int(part) // 100)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
