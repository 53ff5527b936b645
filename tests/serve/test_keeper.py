"""A server whose engine is lost, or that is killed, is started again by its keeper; requests whose
reply had not begun are answered by the fresh one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from worlds.interrupted import TESTS, sigint
from worlds.servers import free_port
from worlds.serving import user

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": user("hello"), "max_tokens": 4, "temperature": 0}
START_S = 120.0  # on a busy machine
pytestmark = pytest.mark.skipif(not hasattr(socket, "send_fds"), reason="one process there")


class KeptServer:
    """`kvweave serve` whose device fails when it is told to."""

    def __init__(self, folder: Path, model: Path, *more: object, **env: str) -> None:
        self.faults = folder / "faults"
        self.faults.mkdir()
        self.errors = folder / "stderr"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "worlds.failing_server", str(self.faults)]
        command += ["serve", "--port", str(port), "--model", str(model), *map(str, more)]
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        home = {"KVWEAVE_HOME": str(folder / "home"), "PYTHONPATH": os.pathsep.join(paths)}
        with sigint(signal.default_int_handler), self.errors.open("w") as told:
            self.process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=told, env={**os.environ, **home, **env}
            )

    def fail(self, *, on: bool) -> None:
        if on:
            (self.faults / "fault").touch()
        else:
            (self.faults / "fault").unlink()

    def slow_down(self, seconds: float) -> None:
        (self.faults / "slow").write_text(str(seconds))

    @property
    def starts(self) -> list[int]:
        """Ids of the servers that loaded weights so far."""
        file = self.faults / "starts"
        return list(dict.fromkeys(map(int, file.read_text().split()))) if file.exists() else []

    @property
    def said(self) -> str:
        return self.errors.read_text()

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: {self.said}"
            time.sleep(0.05)

    def look(self, path: str) -> httpx.Response | None:
        try:
            return httpx.get(f"{self.url}{path}", timeout=10)
        except httpx.TransportError:
            return None

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.said
            reply = self.look("/readyz")
            return reply is not None and reply.status_code == 200

        self.wait_until(is_ready, "not ready")

    def ask(self, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{CHAT}", json={**HELLO, **more}, timeout=START_S)


@contextmanager
def kept(folder: Path, model: Path, *more: object, **env: str) -> Iterator[KeptServer]:
    server = KeptServer(folder, model, *more, **env)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.process.kill()
        server.process.wait()


class Asking(threading.Thread):
    """One request in the background."""

    def __init__(self, server: KeptServer, **more: Any) -> None:
        super().__init__(daemon=True)
        self.reply: httpx.Response | None = None
        self.error: Exception | None = None
        self._server = server
        self._more = more
        self.start()

    def run(self) -> None:
        try:
            self.reply = self._server.ask(**self._more)
        except httpx.TransportError as error:
            self.error = error

    def result(self) -> httpx.Response:
        self.join(START_S)
        assert self.reply is not None, f"{self.error}: {self._server.said}"
        return self.reply


def ask_in_pieces(server: KeptServer) -> socket.socket:
    """Send the head of a request, and its body when that has been read."""
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.settimeout(START_S)
    body = json.dumps(HELLO).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
    time.sleep(0.5)
    connection.sendall(body)
    return connection


def words_of(events: str) -> str:
    """The text of a streamed answer. Fails unless it is one whole stream."""
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data")]
    assert lines[-1] == "[DONE]", events
    chunks = [json.loads(line) for line in lines[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1, "one stream has one id"
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_lost_device_loses_only_the_answers_that_had_begun(
    tmp_path: Path, chat_model_folder: Path
) -> None:
    with kept(tmp_path, chat_model_folder) as server:
        right = server.ask().json()["choices"][0]["message"]["content"]
        server.slow_down(0.2)
        begun = Asking(server, stream=True, max_tokens=200, stop_loops=False)
        time.sleep(2.0)
        server.fail(on=True)
        waiting = [Asking(server, stream=how) for how in (False, True, False, True)]
        server.wait_until(lambda: "starting again" in server.said, "not noticed")
        server.fail(on=False)
        server.slow_down(0.0)
        late = [Asking(server), Asking(server, stream=True)]
        health, ready = server.look("/healthz"), server.look("/readyz")
        assert health is not None
        assert ready is not None
        assert health.status_code == 200
        assert "the engine cannot compute any more" in health.json()["stage"]
        assert ready.status_code == 503
        assert int(ready.headers["Retry-After"]) >= 1
        for each in (*waiting, *late):
            reply = each.result()
            assert reply.status_code == 200, reply.text
            if "event-stream" in reply.headers["content-type"]:
                assert words_of(reply.text) == right
            else:
                assert reply.json()["choices"][0]["message"]["content"] == right
        lost = begun.result().text
        assert "the engine was lost before the answer was finished" in lost
        assert "[DONE]" not in lost
        assert len(server.starts) == 2
        again = re.search(r"serving again after \d+\.\d s, (\d+) requests are tried", server.said)
        assert again
        assert int(again[1]) == 6
        metrics = server.look("/metrics")
        assert metrics is not None
        assert "kvweave_requests_resumed_total 6.0" in metrics.text


def test_exact_kv_is_found_right_after(tmp_path: Path, chat_model_folder: Path) -> None:
    documents = [f"To drain node {n}, cordon it and evict each of its pods." for n in range(4)]
    with kept(tmp_path, chat_model_folder) as server:

        def cached() -> int:
            usage = server.ask(documents=documents).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached() == 0
        before = cached()
        assert before > 50
        server.fail(on=True)
        asking = Asking(server)
        server.wait_until(lambda: "starting again" in server.said, "not noticed")
        server.fail(on=False)
        assert asking.result().status_code == 200
        assert cached() == before
        assert "exact KV of" in server.said


def test_a_request_that_was_under_way_goes_on_from_what_was_stored(
    tmp_path: Path, chat_model_folder: Path
) -> None:
    documents = [f"To drain node {n}, cordon it and evict each of its pods." for n in range(4)]
    with kept(tmp_path, chat_model_folder) as server:
        stored = [server.ask(documents=documents).json() for _ in range(2)][1]
        server.slow_down(0.5)  # its prompt is being computed when the device fails
        under_way = Asking(server, documents=documents)
        time.sleep(0.3)
        server.fail(on=True)
        server.wait_until(lambda: "starting again" in server.said, "not noticed")
        server.fail(on=False)
        server.slow_down(0.0)
        reply = under_way.result()
        assert reply.status_code == 200, reply.text
        got = reply.json()
        assert got["choices"][0]["message"] == stored["choices"][0]["message"]
        details = [each["usage"]["prompt_tokens_details"] for each in (got, stored)]
        assert details[0] == details[1], "nothing that was stored is computed again"
        assert details[0]["cached_tokens"] > 50
        assert len(server.starts) == 2


def test_an_engine_that_hangs_is_lost_too(tmp_path: Path, chat_model_folder: Path) -> None:
    with kept(tmp_path, chat_model_folder, KVWEAVE_SERVER_ENGINE_S="3") as server:
        server.slow_down(90.0)
        waiting = [Asking(server, stream=how) for how in (False, True)]
        server.wait_until(lambda: "starting again" in server.said, "not noticed")
        server.slow_down(0.0)
        assert [each.result().status_code for each in waiting] == [200, 200]
        words_of(waiting[1].result().text)
        assert "the engine hangs: a step has taken more than 3 s; starting again" in server.said


def test_a_killed_server_is_started_again_and_what_was_lost_is_said(
    tmp_path: Path, chat_model_folder: Path
) -> None:
    with kept(tmp_path, chat_model_folder) as server:
        server.slow_down(0.2)
        under_way = Asking(server, max_tokens=200, stop_loops=False)
        time.sleep(1.0)
        os.kill(server.starts[-1], signal.SIGKILL)
        server.slow_down(0.0)
        server.wait_until(lambda: "starting again" in server.said, "not noticed")
        slow = ask_in_pieces(server)
        assert server.ask().status_code == 200, "it waited for the next one"
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
        slow.close()
        under_way.join(START_S)
        assert isinstance(under_way.error, httpx.TransportError)
        assert "the server was killed (SIGKILL); what it had is lost; starting again" in server.said
        assert len(server.starts) == 2


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_what_ends_the_keeper_ends_the_server(
    tmp_path: Path, chat_model_folder: Path, how: signal.Signals
) -> None:
    with kept(tmp_path, chat_model_folder) as server:
        server.process.send_signal(how)
        code = server.process.wait(60)
        assert code == {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGKILL: -9}[how]
        server.wait_until(lambda: is_gone(server.starts[-1]), "an orphan")
        assert server.look("/healthz") is None


def test_a_server_that_fails_again_and_again_is_one_line_that_says_why(
    tmp_path: Path, chat_model_folder: Path
) -> None:
    with kept(tmp_path, chat_model_folder, KVWEAVE_SERVER_RESTARTS="2") as server:
        (server.faults / "broken_start").touch()
        server.fail(on=True)
        asking = Asking(server)
        assert server.process.wait(START_S) == 70
        reply = asking.result()
        assert reply.status_code == 503, "who waited hears of it"
        assert "failed 3 times" in reply.json()["error"]["message"]
        last = server.said.splitlines()[-1]
        assert last.startswith("kvweave: the server failed 3 times within 10 minutes, last: ")
        assert last.endswith("; it is not started again")
        assert len(server.starts) == 3


def test_a_request_that_was_there_when_two_engines_were_lost_is_refused(
    tmp_path: Path, chat_model_folder: Path
) -> None:
    with kept(tmp_path, chat_model_folder) as server:
        server.fail(on=True)  # and it stays: the second device fails too
        reply = server.ask()
        assert reply.status_code == 503, reply.text
        assert "the engine" in reply.json()["error"]["message"]


def test_a_stop_while_it_is_started_again_ends_all(tmp_path: Path, chat_model_folder: Path) -> None:
    with kept(tmp_path, chat_model_folder) as server:
        os.kill(server.starts[-1], signal.SIGKILL)
        server.wait_until(lambda: "starting again" in server.said, "not noticed")
        waiting = Asking(server)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) != 0
        assert waiting.result().status_code == 503
        assert server.look("/healthz") is None


def test_without_restarts_there_is_one_process(tmp_path: Path, chat_model_folder: Path) -> None:
    with kept(tmp_path, chat_model_folder, KVWEAVE_SERVER_RESTARTS="0") as server:
        assert server.starts == [server.process.pid]
        server.fail(on=True)
        for _ in range(3):
            assert server.ask().status_code in (500, 503)
        assert server.process.wait(60) == 70
