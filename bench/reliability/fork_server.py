"""Starts `kvweave …` processes quickly: it has imported everything, and forks one for each order.

`main` is what the process runs, `ForkServer` the handle of whoever gives orders. An order is a line
of JSON on stdin: `argv`, `env` (variables to set), `out` (a file for its stdout and stderr). The
answer is a line `started PID`; when the process has ended, `ended PID CODE`. Each runs the real
entry point in a session of its own. No thread is started before a fork.
"""

import importlib
import json
import os
import pkgutil
import queue
import selectors
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from common.files import REPO

# imported inside functions of the package, or on the first request
ALSO = (
    *("torch", "faiss", "filelock", "fastapi", "uvicorn", "uvicorn.loops.auto"),
    *(
        "uvicorn.protocols.http.h11_impl",
        "uvicorn.lifespan.on",
        "rich.console",
        "safetensors.torch",
    ),
    *("tokenizers", "jinja2.sandbox", "python_multipart.multipart", "prometheus_client", "psutil"),
)
NOT = ("gpu", "vllm", "ui_test", "child")  # parts of names: for other machines, or scripts


def import_all() -> None:
    import kvweave

    for name in ALSO:
        importlib.import_module(name)
    for module in pkgutil.walk_packages(kvweave.__path__, "kvweave."):
        is_script = module.name.rpartition(".")[2].startswith("__")
        if not is_script and not any(part in module.name for part in NOT):
            importlib.import_module(module.name)


def main() -> None:
    import_all()
    say("ready")
    alive: set[int] = set()
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ)
    unread = b""
    while True:
        if waiting.select(0.02):
            piece = os.read(0, 1 << 16)
            if not piece:
                return  # whoever gave orders is gone
            *orders, unread = (unread + piece).split(b"\n")
            for order in orders:
                child = start(json.loads(order))
                alive.add(child)
                say(f"started {child}")
        for child in list(alive):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                alive.discard(child)
                say(f"ended {pid} {os.waitstatus_to_exitcode(status)}")


def start(order: dict[str, Any]) -> int:
    child = os.fork()
    return child or run(order)


def run(order: dict[str, Any]) -> NoReturn:
    """In the child."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(order["env"])
    sys.argv = ["kvweave", *order["argv"]]
    from kvweave.cli import main as command

    code = 70
    try:
        command()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


class Forked:
    """A process that was forked. `kill` it, or `wait` for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self._ended = threading.Event()

    def kill(self) -> None:
        """SIGKILL, at once; returns when it is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait(60)

    def terminate(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code; None: it still runs."""
        self._ended.wait(timeout_s)
        return self.code

    def ended(self, code: int) -> None:
        self.code = code
        self._ended.set()


class ForkServer:
    """Gives orders, from any thread. `close` it: processes that still run are left alone."""

    def __init__(self, env: dict[str, str]) -> None:
        """`env`: variables of all processes. Returns when everything is imported."""
        code = "from reliability.fork_server import main; main()"
        paths = [str(Path(__file__).parents[1]), str(REPO / "src")]
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._order = threading.Lock()
        self._started: queue.Queue[Forked] = queue.Queue()
        self._running: dict[int, Forked] = {}
        assert self._process.stdout is not None, "asked for"
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("the fork server did not start")
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, *argv: str, out: Path, env: dict[str, str] | None = None) -> Forked:
        """`kvweave ARGV`; its output goes to the end of `out`."""
        with self._order:
            assert self._process.stdin is not None, "asked for"
            order = {"argv": argv, "env": env or {}, "out": str(out)}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return self._started.get(timeout=60)

    def _listen(self) -> None:
        assert self._process.stdout is not None, "asked for"
        for line in self._process.stdout:
            word, pid, *code = line.split()
            if word == "started":
                self._running[int(pid)] = Forked(int(pid))
                self._started.put(self._running[int(pid)])
            else:
                self._running.pop(int(pid)).ended(int(code[0]))

    def close(self) -> None:
        assert self._process.stdin is not None, "asked for"
        self._process.stdin.close()
        self._process.wait(60)
