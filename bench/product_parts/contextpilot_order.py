"""ContextPilot in front of vLLM: the order that it gives the chunks of a prompt.

Its `reorder` looks at one request after the other as they arrive, and puts first what it saw first
in an earlier prompt, so that vLLM's prefix cache finds it. `make contextpilot` builds its
environment, in which it runs as a child.
"""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from product_parts.workloads import Hits, Search

ORDER = """
import contextlib, json, sys
with contextlib.redirect_stdout(sys.stderr):  # it reports every step
    from contextpilot import ContextPilot
    pilot = ContextPilot(use_gpu=False)
for line in sys.stdin:
    with contextlib.redirect_stdout(sys.stderr):
        reordered, _ = pilot.reorder(json.loads(line))
    print(json.dumps(reordered[0]), flush=True)
"""


def find_contextpilot(venv: Path) -> tuple[Path | None, str]:
    """The environment's Python, or None and why there is none."""
    if not any(venv.glob("lib/python*/site-packages/contextpilot/__init__.py")):
        why = f"ContextPilot is left out: it is not in {venv.name}; make contextpilot builds that"
        return None, why
    return venv / "bin" / "python", ""


class ContextPilotOrder:
    """Its process. One thread."""

    def __init__(self, python: Path, log: Path) -> None:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), "-c", ORDER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                text=True,
            )
        self._log = log
        self.last_ms = 0.0  # that the last order took

    def reorder(self, texts: Sequence[str]) -> list[str]:
        """Return `texts` in its order."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        began_s = time.perf_counter()
        self._process.stdin.write(json.dumps(list(texts)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"ContextPilot ended; it said:\n{self._log.read_text()[-3000:]}")
        self.last_ms = (time.perf_counter() - began_s) * 1e3
        ordered: list[str] = json.loads(line)
        assert sorted(ordered) == sorted(texts), "an order is a permutation"
        return ordered

    def reordered(self, search: Search) -> Search:
        """Return `search` with its hits in ContextPilot's order."""

        def searched(kb: str, question: str) -> Hits:
            by_text = {hit["text"]: hit for hit in search(kb, question)}
            return [by_text[text] for text in self.reorder(list(by_text))]

        return searched

    def rss_mb(self) -> float:
        return float(psutil.Process(self._process.pid).memory_info().rss / 1e6)

    def close(self) -> None:
        """End it. Safe to call twice."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
