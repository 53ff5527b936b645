"""A real Open WebUI, started as a user would, before servers of OpenAI's API.

`make test-webui` builds its environment; `KVWEAVE_WEBUI` names another one's Python.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from worlds.servers import free_port

REPO = Path(__file__).resolve().parents[2]
START_S = 900.0  # imports of thousands of files, and its database is made
WORK_S = 120.0  # until a file is taken in
# what docs/clients.md tells its users to set, beside addresses and names
SETTINGS = {
    "DEFAULT_MODEL_METADATA": json.dumps({"capabilities": {"builtin_tools": False}}),
    "RAG_EMBEDDING_ENGINE": "openai",
    "ENABLE_OLLAMA_API": "False",
}
APART = {  # nothing is asked of anybody else
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "a test",
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "ANONYMIZED_TELEMETRY": "False",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
}


def webui_python() -> Path:
    """Never skipped: `make test-webui` is there to run this."""
    python = Path(os.environ.get("KVWEAVE_WEBUI", REPO / ".venv-openwebui/bin/python"))
    if not python.is_file():
        raise RuntimeError(f"{python} is not there; make test-webui builds it")
    return python


class WebUI:
    """A running one, and its API as its only user calls it. Close it."""

    def __init__(self, folder: Path, upstreams: Sequence[str], embedder: str, task_model: str):
        """`upstreams` are addresses of servers; the first one embeds."""
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "webui.log"
        named = {
            "DATA_DIR": str(folder / "data"),
            "OPENAI_API_BASE_URLS": ";".join(f"{each}/v1" for each in upstreams),
            "OPENAI_API_KEYS": ";".join("none" for _ in upstreams),
            "RAG_OPENAI_API_BASE_URL": f"{upstreams[0]}/v1",
            "RAG_OPENAI_API_KEY": "none",
            "RAG_EMBEDDING_MODEL": embedder,
            "TASK_MODEL_EXTERNAL": task_model,
        }
        (folder / "data").mkdir(parents=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVWEAVE_"))}
        command = [str(webui_python().parent / "open-webui"), "serve", "--host", "127.0.0.1"]
        with self.log.open("w") as out:
            self._process = subprocess.Popen(
                [*command, "--port", self.url.rpartition(":")[2]],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**kept, **SETTINGS, **APART, **named},
                cwd=folder,
                start_new_session=True,
            )
        self.http = httpx.Client(base_url=self.url, timeout=120.0)
        try:
            self._wait_for_health()
            signed = self.call("POST", "/api/v1/auths/signin", {"email": "", "password": ""})
        except BaseException:
            self.close()
            raise
        self.http.headers["Authorization"] = f"Bearer {signed['token']}"

    def call(self, method: str, path: str, body: Any = None, **how: Any) -> Any:
        reply = self.http.request(method, path, json=body, **how)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}\n{self.tail()}"
        return reply.json()

    def take_in(self, name: str, text: str) -> str:
        """Upload a file; its id, once it is embedded."""
        file = {"file": (name, text.encode(), "text/markdown")}
        made = str(self.call("POST", "/api/v1/files/", files=file)["id"])
        until_s = time.monotonic() + WORK_S
        while time.monotonic() < until_s:
            told = self.call("GET", f"/api/v1/files/{made}/process/status")["status"]
            if told != "pending":
                assert told == "completed", f"{told}\n{self.tail()}"
                return made
            time.sleep(0.2)
        raise AssertionError(f"{name} is not taken in after {WORK_S:.0f} s\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text()[-4000:]

    def close(self) -> None:
        self.http.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_for_health(self) -> None:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            assert self._process.poll() is None, f"it ended\n{self.tail()}"
            with suppress(httpx.TransportError):
                if self.http.get("/health").status_code == 200:
                    return
            time.sleep(0.5)
        raise AssertionError(f"not healthy after {START_S:.0f} s\n{self.tail()}")


@contextmanager
def running_webui(
    folder: Path, upstreams: Sequence[str], *, embedder: str, task_model: str
) -> Iterator[WebUI]:
    made = WebUI(folder, upstreams, embedder, task_model)
    try:
        yield made
    finally:
        made.close()
