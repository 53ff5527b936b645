"""Which files does one question pass, in order?

A question to an open knowledge base with reuse "auto", answered by fusing chunk KV from disk, runs
under a profiler; a file counts when one of its functions runs, import time left out. `--whole` also
counts `kvweave ask` itself: the command line, and loading and opening everything.

    python bench/walk.py
"""

import argparse
import os
import sys
import tempfile
import threading
from contextlib import suppress
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import CodeType
from typing import Any

QUESTION = "What does the second note say of the harbour?"
WORDS = "the harbour of the old town keeps a light for ships that come late from the north sea"


class Walk:
    """Files of the package in the order in which their functions first ran."""

    def __init__(self, root: Path) -> None:
        self._root = f"{root}{os.sep}"
        self._seen: set[CodeType] = set()
        self.files: dict[str, None] = {}

    def __call__(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        self._seen.add(code)
        is_function = code.co_flags & CO_NEWLOCALS and code.co_name != "<lambda>"
        if is_function and code.co_filename.startswith(self._root):
            self.files.setdefault(code.co_filename[len(self._root) :])


def make_kb(folder: Path) -> None:
    """A knowledge base with chunk KV on disk, on a machine that was measured."""
    from kvweave.app.weave import Weave

    texts = [(f"Note {i}", " ".join(f"{WORDS} {i} {j}." for j in range(9))) for i in range(8)]
    with Weave.open(folder, model="smollm2") as weave:
        weave.ingest(*texts, chunk_kv=True)
        weave.plan(QUESTION)


def ask(kb: Path, walk: Walk) -> None:
    """From the call to the last token, on a Weave that has just been opened."""
    from kvweave.app.weave import Weave
    from kvweave.engine.sampling import Sampling

    with Weave.open(kb, model="smollm2") as weave:
        sys.setprofile(walk)
        threading.setprofile(walk)
        answer = weave.ask(QUESTION, reuse="auto", sampling=Sampling(max_tokens=4))
        sys.setprofile(None)
    assert answer.explain is not None
    assert answer.explain.counts["recomputed"], "it was not fused"


def ask_whole(kb: Path, walk: Walk) -> None:
    """As a person does."""
    from kvweave.cli import main as cli

    sys.argv = ["kvweave", "ask", QUESTION, "--kb", str(kb), "--reuse", "auto", "--max-tokens", "4"]
    threading.setprofile(walk)
    sys.setprofile(walk)
    with suppress(SystemExit):
        cli()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="count the command and opening too")
    args = parser.parse_args()
    import kvweave

    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("KVWEAVE_HOME", folder)
        kb = Path(folder) / "kb"
        make_kb(kb)
        walk = Walk(Path(kvweave.__file__).parent)
        (ask_whole if args.whole else ask)(kb, walk)
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    for file in walk.files:
        print(file)
    print(f'{{"files": {len(walk.files)}}}')


if __name__ == "__main__":
    main()
