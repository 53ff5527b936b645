"""The servers that bench/product.py asks, each a process of its own.

They take turns: while one answers the others are frozen, and before each turn all of them may
finish what they do when idle. So a server that works in idle time slows no other one's answers.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil

from common.files import REPO
from kvweave.app.library.runtime import RANDOM
from kvweave.paths import home

START_S = 600.0  # a server that is not ready by then has failed; it may measure the machine first
LOOK_S = 0.1  # how long a server must be quiet before it counts as idle
QUIET_SHARE = 0.2  # of one core, over LOOK_S
STOP_S = 30.0


class ServerProcess:
    """A server and all processes it starts. `log` takes what it prints. One thread."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path
    ) -> None:
        self.name = name
        self.log = log
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,  # so that its children freeze and end with it
            )
        self._is_stopped = False
        self._seen = psutil.Process(self._process.pid)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def freeze(self) -> None:
        for process in self.processes():  # `kvweave serve` is two, in groups of their own
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def cpu_s(self) -> float:
        """Seconds of compute so far, its children's included."""
        total = 0.0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def rss_mb(self) -> float:
        """Memory of the server and its children."""
        return float(sum(process.memory_info().rss for process in self.processes()) / 1e6)

    def processes(self) -> list[psutil.Process]:
        """The server and all that it started and that it waits for."""
        return [self._seen, *self._seen.children(recursive=True)]

    def stop(self) -> None:
        """End it, and whatever it started. Safe to call twice."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self.is_alive:
            self.thaw()
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        with suppress(ProcessLookupError):  # all are gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def fail(self, what: str) -> SystemExit:
        """Ends the bench with what the server said last."""
        return SystemExit(f"{self.name} {what}; it said:\n{self.log.read_text()[-3000:]}")


class RunningServer:
    """A process and the way to talk to it."""

    def __init__(self, process: ServerProcess, url: str) -> None:
        self.process = process
        self._url = url
        self.http = self._connect()

    @property
    def name(self) -> str:
        return self.process.name

    def _connect(self) -> httpx.Client:
        return httpx.Client(base_url=self._url, timeout=httpx.Timeout(600.0))

    def reconnect(self) -> None:
        """Leave the connections there were: a server that was frozen for minutes may drop them."""
        self.http.close()
        self.http = self._connect()

    def metrics(self) -> dict[str, float]:
        """Series of /metrics, labels and all, with their values."""
        page = self.http.get("/metrics").text.splitlines()
        pairs = (line.rpartition(" ") for line in page if line and not line.startswith("#"))
        return {series: float(value) for series, _, value in pairs}

    def close(self) -> None:
        self.http.close()
        self.process.stop()


def wait_for_health(server: RunningServer, most_s: float) -> None:
    """Wait until it answers; ends it where it does not. Another program's server, by /health."""
    until_s = time.monotonic() + most_s
    try:
        while server.process.is_alive and time.monotonic() < until_s:
            with suppress(httpx.TransportError):  # it does not listen yet
                if server.http.get("/health").status_code == 200:
                    return
            time.sleep(0.5)
        raise server.process.fail("did not start")
    except BaseException:  # the bench may be stopped meanwhile
        server.close()
        raise


@contextmanager
def taking_turns(servers: Sequence[RunningServer], index: int, settle_s: float) -> Iterator[None]:
    """Let all finish what they do when idle, then only `servers[index]` run."""
    settle([server.process for server in servers], settle_s)
    others = [server.process for place, server in enumerate(servers) if place != index]
    for other in others:
        other.freeze()
    try:
        yield
    finally:
        for other in others:
            other.thaw()


def settle(processes: Sequence[ServerProcess], most_s: float) -> bool:
    """Wait until no process computes; False if one still does after `most_s`."""
    until_s = time.monotonic() + most_s
    while True:
        before_s, looked_s = sum(p.cpu_s() for p in processes), time.monotonic()
        time.sleep(LOOK_S)
        used_s = sum(p.cpu_s() for p in processes) - before_s
        if used_s <= QUIET_SHARE * (time.monotonic() - looked_s):
            return True
        if time.monotonic() > until_s:
            return False


def own_home(folder: Path) -> Path:
    """A cache folder without anything measured: this run's machine profile is its own."""
    made = folder / "home"
    made.mkdir()
    (made / "models").symlink_to(home() / "models")
    return made


def default_env(home_folder: Path) -> dict[str, str]:
    """Nothing of this shell's settings reaches a server: it runs by its defaults."""
    dropped = ("KVWEAVE_", "OMP_", "MKL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = os.pathsep.join(filter(None, (str(REPO / "src"), os.environ.get("PYTHONPATH"))))
    mine = {"PYTHONPATH": path, "KVWEAVE_HOME": str(home_folder)}
    return {**kept, **mine, "XDG_CONFIG_HOME": str(home_folder / "config")}


def start_kvweave(
    name: str,
    model: str,
    kb_root: Path,
    home_folder: Path,
    device: str = "auto",
    more: Mapping[str, str] = MappingProxyType({}),
) -> RunningServer:
    """`kvweave serve` with its defaults, once it is ready; `more` are variables besides.
    `random:NAME` is a shape's name."""
    flag = "--shape" if model.startswith(RANDOM) else "--model"
    command = [sys.executable, "-m", "kvweave", "serve", "--port", "0"]
    command += [flag, model.removeprefix(RANDOM), "--kb-root", str(kb_root), "--device", device]
    log = home_folder.parent / f"{name}.log"
    cwd = home_folder.parent  # where no kvweave.toml lies
    process = ServerProcess(name, command, {**default_env(home_folder), **more}, log, cwd)
    try:
        return RunningServer(process, _greeting(process))
    except BaseException:
        process.stop()
        raise


def _greeting(process: ServerProcess) -> str:
    """The address that a server prints when it is ready."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if found := re.search(r"serves \S+ at (http://[^/\s]+)", process.log.read_text()):
            return found[1]
        if not process.is_alive:
            raise process.fail("did not start")
        time.sleep(0.2)
    raise process.fail(f"was not ready after {START_S:.0f} s")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
