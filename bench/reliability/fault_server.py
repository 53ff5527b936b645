"""The server that faults are done to: `kvweave serve` as a process, asked over HTTP."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from common.files import REPO
from reliability.fault_hooks import order
from reliability.fault_rules import FaultRule

START_S = 900.0  # on a busy machine
STUCK_S = 90.0  # a request that takes longer is stuck
KB = "k"
# root reads and writes whatever the permissions say, unless it gives that up before the server is
# started: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH leave the bounding set (PR_CAPBSET_DROP is 24)
_PLAIN = (
    "import ctypes,os,sys\n"
    "libc=ctypes.CDLL(None)\n"
    "[libc.prctl(24,c,0,0,0) for c in (1,2) if os.geteuid()==0]\n"
    "os.execv(sys.argv[1],sys.argv[1:])"
)
_HOOKED = "from reliability.fault_hooks import main; main()"


class Reply(NamedTuple):
    """What became of one request."""

    status: int  # 0: the connection broke; -1: it was stuck
    seconds: float
    text: str = ""
    logprobs: tuple[float, ...] = ()
    tiers: tuple[str | None, ...] = ()  # by chunk
    whys: tuple[str, ...] = ()
    error: str = ""
    sources: tuple[str, ...] = ()  # titles of the documents it was made from


class Ended(Exception):
    """The server ended; its code and what it said last."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"exit code {code}: {said[-300:]}")
        self.code = code
        self.said = said


class FaultServer:
    """One server in a folder of its own, started and stopped any number of times."""

    def __init__(
        self, folder: Path, model: Path, embedder: Path, env: Mapping[str, str], *, hooked: bool
    ) -> None:
        self.folder = folder
        self.kbs = folder / "kbs"
        self.log = folder / "log"
        self._control = folder / "control"
        self._hooked = hooked
        self._flags = ["--port", "0", "--model", str(model), "--embedder", str(embedder)]
        self._flags += ["--kb-root", str(self.kbs), "--quant", "none", "--encoding", "isolated"]
        home = folder.parent / "home"  # shared: the first one measures the machine
        for each in (folder, home):
            each.mkdir(parents=True, exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("KVWEAVE_")}
        self._env = {
            **kept,
            "PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO / "bench")]),
            "KVWEAVE_HOME": str(home),
            "KVWEAVE_CONFIG": os.devnull,
            "KVWEAVE_SERVER_RESTARTS": "0",  # one process: what becomes of it is what is looked at
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **env,
        }
        self.env_more: dict[str, str] = {}  # for the next start
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client()
        self.url = ""

    # ---- the process

    def start(self, wait_s: float = START_S) -> float:
        """Returns how long it took. Raises Ended where it ends instead."""
        began_s = time.monotonic()
        python = [sys.executable, "-c", _HOOKED] if self._hooked else [sys.executable]
        with suppress(FileNotFoundError):
            self._control.unlink()
        command = (
            [*python, str(self._control), "serve"]
            if self._hooked
            else [*python, "-m", "kvweave", "serve"]
        )
        with self.log.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PLAIN, *command, *self._flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**self._env, **self.env_more},
                cwd=self.folder,
            )
        while time.monotonic() - began_s < wait_s:
            if found := re.search(r"serves \S+ at (http://[^/\s]+)", self.log.read_text()):
                self.url = found[1]
                self.http.close()
                self.http = httpx.Client(base_url=self.url, timeout=STUCK_S)
                return time.monotonic() - began_s
            if (code := self._process.poll()) is not None:
                raise Ended(code, self.log.read_text())
            time.sleep(0.05)
        self.kill()
        raise TimeoutError(f"not ready after {wait_s:g} s: {self.log.read_text()[-500:]}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None: it has not ended."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, wait_s: float = 60.0) -> float:
        """In order; returns how long it took. One that does not end is killed: infinity."""
        began_s = time.monotonic()
        if not self.is_alive:
            return 0.0
        self.signal(signal.SIGTERM)
        if self.wait(wait_s) is None:
            self.kill()
            return float("inf")
        return time.monotonic() - began_s

    def kill(self) -> None:
        if self._process is not None and self.is_alive:
            self._process.kill()
            self._process.wait()

    # ---- hooks

    def order(self, do: str, **more: Any) -> Any:
        return order(self._control, do, **more)

    def set_rule(self, rule: FaultRule, marked: int | None = None) -> None:
        fields = {name: getattr(rule, name) for name in FaultRule.__slots__}
        self.order("set", rule=fields, marked=marked)

    # ---- over HTTP

    def ask(self, question: str, k: int, reuse: str = "reuse", **more: Any) -> Reply:
        body = {
            "messages": [{"role": "user", "content": question}],
            "kb": KB,
            "k": k,
            "reuse": reuse,
            "explain": True,
            "max_tokens": 4,
            "temperature": 0,
            "logprobs": True,
            **more,
        }
        return self.chat(body)

    def chat(self, body: dict[str, Any]) -> Reply:
        began_s = time.monotonic()
        try:
            reply = self.http.post("/v1/chat/completions", json=body)
        except httpx.TimeoutException:
            return Reply(-1, time.monotonic() - began_s, error="no answer")
        except httpx.TransportError as error:
            return Reply(0, time.monotonic() - began_s, error=type(error).__name__)
        seconds = time.monotonic() - began_s
        if reply.status_code != 200:
            return Reply(reply.status_code, seconds, error=_message(reply))
        found = reply.json()
        choice, explain = found["choices"][0], found.get("explain") or {}
        chunks = explain.get("chunks", [])
        return Reply(
            200,
            seconds,
            choice["message"]["content"],
            tuple(each["logprob"] for each in (choice["logprobs"] or {"content": []})["content"]),
            tuple(chunk["tier"] for chunk in chunks),
            tuple(chunk["why"] for chunk in chunks if chunk["why"]),
            sources=tuple(each["title"] for each in found.get("sources", [])),
        )

    def upload(self, title: str, text: str, *, wait_for_kv: bool = True) -> Reply:
        began_s = time.monotonic()
        try:
            reply = self.http.post(
                f"/v1/kb/{KB}/documents",
                json={"title": title, "text": text, "key": title},
                params={"wait_for_kv": wait_for_kv},
            )
        except httpx.TimeoutException:
            return Reply(-1, time.monotonic() - began_s, error="no answer")
        except httpx.TransportError as error:
            return Reply(0, time.monotonic() - began_s, error=type(error).__name__)
        said = "" if reply.status_code == 200 else _message(reply)
        return Reply(reply.status_code, time.monotonic() - began_s, error=said)

    def documents(self) -> dict[str, str]:
        """Ids by title."""
        reply = self.http.get(f"/v1/kb/{KB}/documents")
        if reply.status_code != 200:
            return {}
        return {each["title"]: each["id"] for each in reply.json()["data"]}

    def delete(self, title: str) -> Reply:
        began_s = time.monotonic()
        document = self.documents().get(title)
        try:
            reply = self.http.delete(f"/v1/kb/{KB}/documents/{document}")
        except httpx.TimeoutException:
            return Reply(-1, time.monotonic() - began_s, error="no answer")
        except httpx.TransportError as error:
            return Reply(0, time.monotonic() - began_s, error=type(error).__name__)
        said = "" if reply.status_code == 200 else _message(reply)
        return Reply(reply.status_code, time.monotonic() - began_s, error=said)

    def metrics(self) -> dict[str, float]:
        """Counters that tell of trouble, labels and all."""
        try:
            page = self.http.get("/metrics", timeout=30).text
        except httpx.TransportError:
            return {}
        return parse_metrics(page, TOLD)


# what tells that something went wrong, and why
TOLD = (
    "kvweave_kv_misses_total",
    "kvweave_kv_tier_errors_total",
    "kvweave_kv_quarantined_total",
    "kvweave_kv_quarantine_spared_total",
    "kvweave_kv_saves_dropped_total",
    "kvweave_kv_admissions_refused_total",
    "kvweave_kv_evictions_total",
    "kvweave_degradations_total",
    "kvweave_answers_total",
    "kvweave_engine_",
)


# numbers of the engine that only grow, though they are not called counters
GROWING = ("kvweave_engine_requests_failed", "kvweave_engine_preemptions")


def parse_metrics(page: str, names: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in page.splitlines():
        series, _, value = line.rpartition(" ")
        if series.startswith(tuple(names)):
            found[series] = float(value)
    return found


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Counters that grew, by how much, without the labels that name the knowledge base."""
    found: dict[str, float] = {}
    for series, value in after.items():
        if "_total" not in series and not series.startswith(GROWING):
            continue
        more = value - before.get(series, 0.0)
        if more > 0:
            short = re.sub(r'(kb|tenant)="[^"]*",?', "", series).removeprefix("kvweave_")
            found[short.replace(",}", "}").replace("{}", "")] = more
    return found


def _message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]
