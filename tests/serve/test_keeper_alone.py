"""What a keeper does by itself, over a server that is a few lines."""

import asyncio
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvweave.serve.keeper import MOST_OF_CLIENT, Keeper

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="its addresses")
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
# serves once and loses its engine; the next one takes long to start
SERVER = """
import sys, time
from kvweave.serve.kept import KeptStart
kept = KeptStart.find()
if not kept.failures:
    kept.hand_over()
    sys.exit(70)
time.sleep(60)
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_stop_before_a_server_is_started_starts_none(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", f"open({str(started)!r}, 'w')"])
    create = asyncio.base_events.BaseEventLoop.create_server

    async def create_and_stop(loop: Any, *args: Any, **how: Any) -> Any:
        server = await create(loop, *args, **how)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        return server

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "create_server", create_and_stop)
    assert Keeper(listener, 5, 60.0).run() == 128 + signal.SIGTERM
    assert not started.exists()


def test_one_address_holds_a_part_of_the_places_to_wait(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", SERVER])
    counts: list[int] = []
    last: list[bytes] = []

    def send(stack: ExitStack, client: str) -> socket.socket:
        place = listener.getsockname()
        made = socket.create_connection(place, timeout=20, source_address=(client, 0))
        stack.enter_context(made).sendall(REQUEST)
        return made

    def num_answered(connections: list[socket.socket]) -> int:
        return len(select.select(connections, [], [], 0)[0])

    def ask() -> None:
        with ExitStack() as stack:
            try:
                while "starting again" not in capfd.readouterr().err:
                    time.sleep(0.05)
                time.sleep(0.2)
                many = [send(stack, "127.0.0.1") for _ in range(MOST_OF_CLIENT + 4)]
                other = send(stack, "127.0.0.2")
                time.sleep(1.0)
                counts.extend((num_answered(many), num_answered([other])))
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
            last.append(other.recv(4096))

    asking = threading.Thread(target=ask)
    asking.start()
    assert Keeper(listener, 5, 60.0).run() == 128 + signal.SIGTERM
    asking.join(20)
    assert counts == [4, 0]
    assert last[0].startswith(b"HTTP/1.1 503 "), "it waited until the end"
