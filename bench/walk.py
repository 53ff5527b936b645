"""Which files does one question pass, in order?

A question to an open knowledge base with reuse "auto", answered by fusing chunk KV from disk, runs
under a profiler; a file counts when one of its functions runs, import time left out. A climb is a
call inside `app/` against the imports: a file calls one that imports it, directly or through
others. `--whole` also counts `kvweave ask` itself: the command line, and loading and opening
everything.

    python bench/walk.py
"""

import argparse
import ast
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
        self.calls: dict[tuple[str, str], str] = {}  # from file to file: the first function

    def __call__(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._root):
            return
        is_function = code.co_flags & CO_NEWLOCALS and not code.co_name.startswith("<")
        if not is_function:
            return
        file = code.co_filename[len(self._root) :]
        if code not in self._seen:
            self._seen.add(code)
            self.files.setdefault(file)
        if file.startswith("app/"):
            back = frame.f_back
            while back is not None and not back.f_code.co_filename.startswith(self._root):
                back = back.f_back
            if back is not None:
                caller = back.f_code.co_filename[len(self._root) :]
                self.calls.setdefault((caller, file), code.co_name)

    def climbs(self) -> list[str]:
        """Calls inside `app/` from a file to one that imports it."""
        above = imported_by(Path(self._root))
        return [
            f"{caller} -> {file}: {name}"
            for (caller, file), name in self.calls.items()
            if caller.startswith("app/") and caller != file and file in above[caller]
        ]


def imported_by(root: Path) -> dict[str, set[str]]:
    """For each file of the package those that import it, directly or through others."""
    importers: dict[str, set[str]] = {str(p.relative_to(root)): set() for p in root.rglob("*.py")}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvweave."):
                below = str(node.module).removeprefix("kvweave.").replace(".", "/") + ".py"
                importers.get(below, set()).add(str(path.relative_to(root)))
    above: dict[str, set[str]] = {}
    for file in importers:
        found: set[str] = set()
        todo = [file]
        while todo:
            new = importers[todo.pop()] - found
            found |= new
            todo += new
        above[file] = found
    return above


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
    climbs = walk.climbs()
    for climb in climbs:
        print("climb:", climb)
    print(f'{{"files": {len(walk.files)}, "climbs": {len(climbs)}}}')


if __name__ == "__main__":
    main()
