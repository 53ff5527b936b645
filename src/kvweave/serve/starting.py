"""Answers while a server starts: what it is doing, instead of silence.

Importing torch, converting a model and loading it hold the interpreter's lock for seconds at a
time, so no thread of that process can be relied on to answer. A small process on the standard
library does, on the same listening socket: /healthz is a 200, every other path a 503 that names the
stage. It ends just before the server takes over, or when the process that started it is gone;
connections that nobody has taken by then wait in the socket's queue for the server.

A stage is a record of the logger "kvweave.stages"; `share`, where it has one, is how much is done.
This file is run by its path and imports nothing of ours.
"""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Self

STAGES = logging.getLogger("kvweave.stages")
FIRST_STAGE = "loading libraries"
REQUEST_S = 5.0  # for a request to come and its connection to end
# what a request may end in: no connection, no time, no whole head, our own end
GIVEN_UP = (
    *(OSError, TimeoutError, asyncio.CancelledError),
    *(asyncio.IncompleteReadError, asyncio.LimitOverrunError),
)
LAST_WORDS_S = 0.5  # for replies under way, once the server takes over


class StageLog(logging.Handler):
    """Inside the `with` every stage is a line on stderr, and `tell` hears of it."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell
        self._lines: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        words, share = record.getMessage(), getattr(record, "share", None)
        stage = words if share is None else f"{words}, {share:.0%}".replace("%", " %")
        line = words if share is None else f"{words}, {int(share * 10) * 10} %"
        if line not in self._lines:
            self._lines.add(line)
            print(f"kvweave: {line}", file=sys.stderr, flush=True)
        self._tell(stage)

    def __enter__(self) -> Self:
        STAGES.addHandler(self)
        STAGES.setLevel(logging.INFO)
        STAGES.propagate = False  # a log need not say it again
        return self

    def __exit__(self, *_: object) -> None:
        STAGES.removeHandler(self)
        STAGES.setLevel(logging.NOTSET)
        STAGES.propagate = True


class StartAnswers:
    """Inside the `with` every stage is a line on stderr; until `hand_over` replies name it, too."""

    def __init__(self, listener: socket.socket) -> None:
        """`listener` stays the caller's."""
        self._listener = listener
        self._log = StageLog(self._tell)
        kept = {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}
        self._child = subprocess.Popen(  # noqa: S603 - our own file, no shell
            [sys.executable, "-I", "-S", __file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=[listener.fileno()],
            process_group=0,  # Ctrl-C of a terminal is for us to pass on
            cwd="/",
            env=kept,  # no keys
        )

    def _tell(self, stage: str) -> None:
        assert self._child.stdin is not None, "it was started with a pipe"
        with suppress(OSError, ValueError):  # it is gone, or was ended
            self._child.stdin.write(stage.encode() + b"\n")

    def hand_over(self) -> socket.socket:
        """Stop answering; the caller does from now on. Harmless the second time."""
        assert self._child.stdin is not None, "it was started with a pipe"
        self._child.stdin.close()
        try:
            self._child.wait(4 * LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        return self._listener

    def __enter__(self) -> Self:
        self._log.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._log.__exit__()
        self.hand_over()


def make_reply(head: bytes, stage: str) -> bytes:
    """Answer a request of which `head` is known."""
    target = [*head.split(b" ", 2), b"", b""][1]
    body: dict[str, object] = {"status": "ok", "stage": stage}
    status = "200 OK"
    if target.partition(b"?")[0] != b"/healthz":
        message = f"the server is starting: {stage}; try again in a moment"
        error = {"message": message, "type": "server_error", "param": None, "code": "starting"}
        body, status = {"error": error}, "503 Service Unavailable"
    content = json.dumps(body).encode()
    lines = (
        f"HTTP/1.1 {status}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "cache-control: no-store",
        "retry-after: 5",
        "refresh: 3",  # a browser shows the stage, and the page once that is there
        "connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + content


async def answer_requests(listener: socket.socket) -> None:
    """Answer with the last line that came on standard input, until that ends."""
    stage = FIRST_STAGE

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(*GIVEN_UP):
            async with asyncio.timeout(REQUEST_S):
                writer.write(make_reply(await reader.readuntil(b"\r\n\r\n"), stage))
                writer.write_eof()
                while await reader.read(1 << 16):  # a body cut off would take the reply with it
                    pass
        writer.close()

    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    server = await asyncio.start_server(answer, sock=listener)
    while line := await lines.readline():
        stage = line.decode().strip()
    server.close()
    if under_way := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(under_way, timeout=LAST_WORDS_S)


if __name__ == "__main__":
    asyncio.run(answer_requests(socket.socket(fileno=int(sys.argv[1]))))
