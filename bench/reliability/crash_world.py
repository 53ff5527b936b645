"""What the crash benches run: a tiny model and embedder, `kvweave serve` over them, and commands.

The model and the embedder are random and real: their folders are what users have, only small.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import httpx

from common.files import REPO
from reliability.fork_server import ForkServer
from reliability.notes import WORDS

KB = "crash"  # the knowledge base that is written
START_S = 300.0  # a server that is not ready by then is a fault


class Process(Protocol):
    """A command that runs."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    def terminate(self) -> None: ...
    def wait(self, timeout_s: float) -> int | None: ...


class PlainProcess:
    """A process of our own, as a person starts it."""

    def __init__(self, argv: list[str], out: Path, env: dict[str, str]) -> None:
        paths = str(REPO / "src")
        with out.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvweave", *argv],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **env, "PYTHONPATH": paths},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


class CrashWorld:
    """Folders, and how commands are started over them. `close` it."""

    def __init__(self, folder: Path, *, forks: bool = True) -> None:
        """`forks` False: every process is started anew."""
        sys.path.insert(0, str(REPO / "tests"))
        from worlds.tiny_embedder import WORDS as EMBEDDER_WORDS
        from worlds.tiny_embedder import make_embedder_folder
        from worlds.tiny_models import make_chat_model_folder

        self.folder = folder
        self.root = folder / "kbs"
        self.root.mkdir(parents=True)
        self.kb = self.root / KB
        self.model = make_chat_model_folder(folder / "model", max_position_embeddings=2048)
        pieces = [c for n in "abcdefghijklmnopqrstuvwxyz0123456789" for c in (n, f"##{n}")]
        vocabulary = [*EMBEDDER_WORDS, *(w for w in WORDS if w not in EMBEDDER_WORDS), *pieces]
        self.embedder = make_embedder_folder(folder / "embedder", words=vocabulary)
        self.log = folder / "server.log"
        self.env = {
            "KVWEAVE_HOME": str(folder / "home"),
            "KVWEAVE_LIBRARY_BACKGROUND_KV": "always",
            # int8 rounds: an answer from stored KV may be another one without any crash
            "KVWEAVE_STORE_CODEC": "raw",
            "KVWEAVE_CONFIG": os.devnull,
            "KVWEAVE_SERVER_RESTARTS": "0",  # one process, which is killed
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._forks = ForkServer(self.env) if forks else None

    def start(self, *argv: str, env: dict[str, str] | None = None, plain: bool = False) -> Process:
        """`kvweave ARGV`."""
        if self._forks is None or plain:
            return PlainProcess([*argv], self.log, {**self.env, **(env or {})})
        return self._forks.start(*argv, out=self.log, env=env)

    def run(self, *argv: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        """Exit code and output of a command that ends."""
        before = self.log.stat().st_size if self.log.exists() else 0
        process = self.start(*argv, env=env)
        code = process.wait(START_S)
        if code is None:
            process.kill()
            raise RuntimeError(f"kvweave {' '.join(argv)} did not end within {START_S:.0f} s")
        return code, self.log.read_bytes()[before:].decode(errors="replace")

    def serve_arguments(self, port: int, *more: str) -> list[str]:
        return [
            *("serve", "--port", str(port), "--model", str(self.model), "--quant", "none"),
            *("--kb-root", str(self.root), "--embedder", str(self.embedder)),
            *("--encoding", "isolated", *more),
        ]

    def check_command(self) -> list[str]:
        """What `kvweave kb check` finds; leftovers of killed writers are swept by the next one."""
        if not (self.kb / "kb.json").is_file():
            return []
        code, said = self.run("kb", "check", "--kb", str(self.kb), "--json")
        lines = [line for line in said.splitlines() if line.startswith("{")]
        if not lines:
            return [f"kb check ended with {code}: {said[-300:]}"]
        problems: list[str] = json.loads(lines[-1])["problems"]
        return [problem for problem in problems if "left behind" not in problem]

    def close(self) -> None:
        if self._forks is not None:
            self._forks.close()


class CrashServer:
    """`kvweave serve` on a port, to be killed."""

    def __init__(self, world: CrashWorld, port: int, **options: Any) -> None:
        """`options` are those of `CrashWorld.start`."""
        self.url = f"http://127.0.0.1:{port}"
        self._log_at = world.log.stat().st_size if world.log.exists() else 0
        self._world = world
        self.process = world.start(*world.serve_arguments(port), **options)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self, timeout_s: float = START_S) -> bool:
        """False: it is not ready by then. Raises RuntimeError if it ended."""
        give_up_s = time.monotonic() + timeout_s
        while time.monotonic() < give_up_s:
            if (code := self.process.wait(0.01)) is not None:
                said = self._world.log.read_bytes()[self._log_at :].decode(errors="replace")
                raise RuntimeError(f"the server ended with {code}: {said[-600:]}")
            try:
                if self.http.get("/readyz", timeout=1).status_code == 200:
                    return True
            except httpx.HTTPError:
                continue
        return False

    def close(self) -> None:
        """Kill it, if it still runs."""
        self.process.kill()
        self.http.close()
