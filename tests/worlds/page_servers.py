"""Servers to look at through the web page: the embedded model as people start it, and what is
brought to a server and asked of it over HTTP before a page is opened."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from worlds.servers import free_port

NOTES = {
    "Draining": "To drain a node, cordon it first. Then evict its pods. A drained node runs none.",
    "Quotas": "A quota limits the pods of a namespace. Without one, it may take a cluster.",
    "Taints": "A taint keeps pods from a node unless they tolerate it. Taints have three effects.",
}

VALLEY = (  # passages of the sample
    *("jorun-pask", "great-flood", "ostrey", "hathersby", "vale-railway", "quarrow"),
    *("slate-quarry", "lantern-bridge"),
)
SHOWN = (  # questions about them, for the walks
    "What was Jorun Pask's boat called?",
    "How wide is the track of the Vale Railway?",
)


def bring(url: str, kb: str, title: str, text: str, **query: Any) -> None:
    """Upload a text; its KV is there when this returns."""
    reply = httpx.post(
        f"{url}/v1/kb/{kb}/documents",
        json={"title": title, "text": text, "key": title},
        params={"wait_for_kv": True, **query},
        timeout=120,
    )
    assert reply.status_code == 200, reply.text


def answered(url: str, **body: Any) -> dict[str, Any]:
    """A whole answer over HTTP; its details are kept."""
    asked = {"messages": [{"role": "user", "content": "how do I drain a node?"}]}
    sampling = {"max_tokens": 24, "temperature": 0, "explain": True}
    reply = httpx.post(f"{url}/v1/chat/completions", json=asked | sampling | body, timeout=120)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


class RealServer:
    """`kvweave serve` with the embedded model, on a port that stays the same over restarts."""

    def __init__(self, root: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._root = root
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "kvweave", "serve", "--port", str(self.port)]
        command += ["--model", "smollm2", "--quant", "none", "--kb-root", str(self._root)]
        environment = os.environ | {"KVWEAVE_LIBRARY_BACKGROUND_KV": "always"}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        assert self._process.stdout is not None
        lines: list[str] = []
        while not (lines and "print(chat" in lines[-1]):
            line = self._process.stdout.readline()
            assert line, f"it ended: {''.join(lines)}"
            lines.append(line)

    def kill(self) -> None:
        """As a power cut would: no farewell to anybody."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate(timeout=60)
        self._process = None

    def close(self) -> None:
        if self._process is not None:
            self.kill()
