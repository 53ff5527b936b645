"""Keeps a server answering: starts it as a process of its own, and again when its engine is lost.

    keeper ── starts ──► server: model, engine, HTTP          both have the listening socket
      ▲                    │
      └── stages, serving, ┘    over a Unix socket; a request passes with its connection
          requests without a reply

While no server serves, the keeper answers: /healthz is a 200, every other path a 503 that names the
stage. While a server serves, the keeper sleeps: no byte of a request passes through it. A server
that loses its engine gives the keeper the requests whose reply has not begun (`access/held.py`) and
ends. A fresh one gets them, and those that came in between, once it serves. What a server that is
killed had is lost with its connections.

A server that fails again and again is not started again. What it is told on SIGINT and SIGTERM is
the keeper's to pass on; if the keeper goes, so does the server. Imports nothing heavy.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

from kvweave.serve.access.held import (
    ELSEWHERE,
    PATHS,
    HeldRequest,
    Message,
    receive_message,
    send_message,
)
from kvweave.serve.starting import FIRST_STAGE, REQUEST_S, make_reply

VARIABLE = "_KVWEAVE_KEEPER"  # what a server is told of its keeper, in its environment
BROKEN_CODE = 70  # exit code where the engine was lost: EX_SOFTWARE of sysexits.h
WITHIN_S = 600.0  # failures that are counted
FIRST_PAUSE_S = 0.5  # before the second start behind a failure; then ever longer
END_S = 40.0  # for a server that lost its engine to end
MOST_HELD = 256  # requests that wait for a server
MOST_OF_CLIENT = 16  # of those: who asks here has shown no API key yet
MOST_HEAD = 1 << 16  # bytes of a request's head


def can_keep() -> bool:
    """Whether this system and this command line allow a second process: the command is started
    again as it was, so it must be what Python itself was started with."""
    given = sys.argv[1:]
    is_own = bool(given) and sys.orig_argv[-len(given) :] == given
    return is_own and hasattr(socket, "send_fds") and hasattr(os, "getppid") and os.name == "posix"


class Keeper:
    """One server after another, on one socket. `run` blocks until the last one ended."""

    def __init__(self, listener: socket.socket, restarts: int, request_s: float) -> None:
        """At most `restarts` within `WITHIN_S`; a request may wait for `request_s` in all.
        `listener` stays the caller's."""
        self._listener = listener
        self._restarts = restarts
        self._request_s = request_s
        self._answers: asyncio.Server | None = None  # while no server serves
        self._held: list[HeldRequest] = []
        self._failures: deque[float] = deque()  # when they were, the last ones
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._stage = FIRST_STAGE
        self._why: str | None = None  # what was wrong with the last one, if anything was
        self._has_served = False  # any of them
        self._has_told = False  # the one that runs told that its engine is lost
        self._began_s = 0.0  # when the first failure of this row was
        self._stopping: int | None = None  # by which signal
        self._woken = asyncio.Event()
        self._end = "the server was stopped"  # what those hear who still wait

    def run(self) -> int:
        """Return the exit code of the whole."""
        with _open_memory() as memory:
            return asyncio.run(self._keep(memory))

    @property
    def stage(self) -> str:
        """What is being done, for those who ask meanwhile."""
        if self._why is None:
            return self._stage
        return f"{self._why}; starting again: {self._stage}"

    def can_wait(self, client: str) -> bool:
        """Whether a request that comes now, from this address, is kept for the next server."""
        if self._why is None or len(self._held) >= MOST_HELD:
            return False
        # those that a server passed on had been let in there
        own = sum(held.client == client for held in self._held if not held.tries)
        return own < MOST_OF_CLIENT

    def hold(self, held: HeldRequest) -> None:
        """Keep a request until a server serves."""
        self._held.append(held)

    async def _keep(self, memory: BinaryIO) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell has it for jobs
                loop.add_signal_handler(number, self._pass_signal_on, number)
        late = asyncio.create_task(self._refuse_late())
        try:
            while True:
                code = await self._run_server(memory)
                if not self._is_failure(code):
                    if code < 0 and self._stopping is None:
                        _say(_words_of(code))
                    return code if code >= 0 else 128 - code
                if not await self._wait_for_turn(code):
                    return BROKEN_CODE if self._stopping is None else 128 + self._stopping
        finally:
            late.cancel()
            await self._stop_answering()
            self._refuse_held(self._end)

    async def _run_server(self, memory: BinaryIO) -> int:
        """Start a server and wait for its end; return its exit code, or minus a signal."""
        await self._begin_answering()
        if self._stopping is not None:  # it came meanwhile, when there was nobody to pass it to
            return -self._stopping
        self._stage, self._has_told = FIRST_STAGE, False
        own, theirs = socket.socketpair()
        shared = (theirs.fileno(), self._listener.fileno(), memory.fileno())
        told = ",".join(map(str, (*shared, len(self._failures), os.getpid())))
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - this very command, no shell
                [sys.executable, *sys.orig_argv[1:]],
                env={**os.environ, VARIABLE: told},
                pass_fds=shared,
                process_group=0,  # Ctrl-C of a terminal is for the keeper to pass on
            )
        self._process, self._channel = process, own
        loop = asyncio.get_running_loop()
        reading = threading.Thread(target=self._read, args=(own, loop), daemon=True)
        reading.start()
        code = await asyncio.to_thread(process.wait)
        await asyncio.to_thread(reading.join, REQUEST_S)  # what it said last comes before its end
        await asyncio.sleep(0)
        self._process = self._channel = None
        own.close()
        return code

    def _read(self, channel: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        """Hear a server until it is gone. On a thread of its own."""
        while (message := receive_message(channel)) is not None:
            with suppress(RuntimeError):  # closed: the end
                asyncio.run_coroutine_threadsafe(self._hear(message, channel), loop).result()

    async def _hear(self, message: Message, channel: socket.socket) -> None:
        kind: str = message.words["kind"]
        if kind == "stage":
            self._stage = message.words["words"]
        elif kind == "serving":
            await self._give_over(channel)
        elif kind == "held":
            self.hold(HeldRequest.from_message(message))
        elif kind == "broken":
            self._note_failure(message.words["why"])
            self._has_told = True
            self._stage = "the old process ends"
            await self._begin_answering()
            if self._process is not None:  # it may hang where no signal of ours is heard
                kill = partial(_kill, self._process)
                asyncio.get_running_loop().call_later(END_S, kill)

    async def _give_over(self, channel: socket.socket) -> None:
        """Let the server answer from now on, and have what waits."""
        await self._stop_answering()
        held, self._held = self._held, []
        if self._why is not None:
            seconds = time.monotonic() - self._began_s
            _say(f"serving again after {seconds:.1f} s, {len(held)} requests are tried again")
        self._has_served, self._why = True, None
        await asyncio.to_thread(_send_all, channel, held)

    # ---- failures

    def _is_failure(self, code: int) -> bool:
        """Whether another server may do better than one that ended so."""
        if self._stopping is not None or not code or not self._has_served:
            return False
        # on the way to serve again every end is one
        return self._why is not None or code < 0 or code == BROKEN_CODE

    def _note_failure(self, why: str) -> None:
        if self._why is None:
            self._began_s = time.monotonic()
        self._why = why

    async def _wait_for_turn(self, code: int) -> bool:
        """Wait before the next start, ever longer. False: there have been too many, or a signal
        came."""
        if not self._has_told:
            self._note_failure(_words_of(code))
        now_s = time.monotonic()
        self._failures.append(now_s)
        while now_s - self._failures[0] > WITHIN_S:
            self._failures.popleft()
        if len(self._failures) > self._restarts:
            times = f"{len(self._failures)} times within {WITHIN_S / 60:g} minutes"
            self._end = f"the server failed {times}, last: {self._why}"
            _say(f"{self._end}; it is not started again")
            return False
        _say(f"{self._why}; starting again")
        pause_s = 0.0 if len(self._failures) == 1 else FIRST_PAUSE_S * 2 ** len(self._failures)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), pause_s)
        return self._stopping is None

    def _pass_signal_on(self, number: int) -> None:
        self._stopping = number
        self._woken.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    # ---- answers while no server serves

    async def _begin_answering(self) -> None:
        if self._answers is None:
            self._answers = await asyncio.get_running_loop().create_server(
                lambda: _Arrival(self), sock=self._listener.dup()
            )

    async def _stop_answering(self) -> None:
        """What has not been taken by now waits in the socket's queue for the server."""
        if self._answers is not None:
            self._answers.close()
            self._answers = None

    async def _refuse_late(self) -> None:
        """Refuse what waited for as long as a request may take."""
        while True:
            await asyncio.sleep(1.0)
            oldest_s = time.monotonic() - self._request_s
            late = [held for held in self._held if held.arrived_s < oldest_s]
            self._held = [held for held in self._held if held.arrived_s >= oldest_s]
            for held in late:
                words = f"the answer was not finished within {self._request_s:g} s"
                held.refuse("504 Gateway Timeout", words, "timeout")

    def _refuse_held(self, words: str) -> None:
        for held in self._held:
            held.refuse("503 Service Unavailable", f"{words}; ask another one")
        self._held = []


class _Arrival(asyncio.Protocol):
    """A connection that came while no server serves: answered, or kept with what came on it."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._came = b""
        self._arrived_s = time.monotonic()
        self._is_answered = False
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._late = asyncio.get_running_loop().call_later(REQUEST_S, transport.abort)

    def connection_lost(self, _: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_answered:
            return  # a body that is cut off would take the reply with it
        self._came += data
        head, is_whole, _ = self._came.partition(b"\r\n\r\n")
        if not is_whole:
            if len(self._came) > MOST_HEAD:
                self._transport.abort()
            return
        peer = self._transport.get_extra_info("peername")
        client = str(peer[0]) if peer else ""
        if _can_wait(head) and self._keeper.can_wait(client):
            self._keeper.hold(self._let_go(client))
            return
        self._is_answered = True
        self._transport.write(make_reply(head, self._keeper.stage))
        self._transport.write_eof()

    def _let_go(self, client: str) -> HeldRequest:
        descriptor = self._transport.get_extra_info("socket").fileno()
        connection = socket.socket(fileno=os.dup(descriptor))
        self._transport.abort()
        return HeldRequest(connection, self._came, self._arrived_s, client=client)


def _can_wait(head: bytes) -> bool:
    method, path, *_ = [*head.split(b" ", 2), b"", b""]
    return method == b"POST" and path in PATHS and ELSEWHERE not in head.lower()


def _open_memory() -> BinaryIO:
    """A file without a name, for what one server leaves to the next; in memory where it can be."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("kvweave"), "w+b")
    return tempfile.TemporaryFile()


def _send_all(channel: socket.socket, held: list[HeldRequest]) -> None:
    """Send what waits. Whatever becomes of the server, a connection stays with nobody else."""
    with suppress(OSError):
        for each in held:
            words: dict[str, Any] = {"kind": "held", **each.describe()}
            send_message(channel, Message(words, each.received, each.connection))
        send_message(channel, Message({"kind": "go"}))
    for each in held:
        each.connection.close()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()


def _words_of(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"the server was killed ({signal.Signals(-code).name}); what it had is lost"
    if code == BROKEN_CODE:
        return "the engine was lost"
    return f"the server ended with code {code}"


def _say(words: str) -> None:
    print(f"kvweave: {words}", file=sys.stderr, flush=True)
