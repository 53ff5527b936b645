"""uvicorn with manners: it says when it is ready, and answers in the making end in order.

What is to be done before the first answer (`prepare`) is done while connections are taken already:
/healthz says that the process is alive, /readyz that it is not ready yet.

A stopping server first says so on /readyz and refuses new work, for load balancers to notice
(`lame_s`). Then it takes no new connections and lets answers finish for a while (`patience_s`).
Then it gives them up: each client gets its error in the usual shape instead of a broken connection.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

import uvicorn

from kvweave.app.libraries.libraries import Libraries
from kvweave.app.weave import Weave
from kvweave.errors import EngineClosed
from kvweave.serve.auth import Keys
from kvweave.serve.context import Context
from kvweave.serve.http import build_http
from kvweave.serve.limits import Limits

log = logging.getLogger(__name__)

LAST_WORDS_S = 5  # for the errors to go out, before connections are cut


class Prepare(NamedTuple):
    """What a server does before it is ready."""

    words: str  # for /readyz
    work: Callable[[], None]  # on a thread of its own


class Server(uvicorn.Server):
    """Serves one Weave. `run([listener])` blocks until a signal or `stop`."""

    def __init__(
        self,
        weave: Weave,
        *,
        limits: Limits | None = None,
        libraries: Libraries | None = None,
        keys: Keys | None = None,
        patience_s: float = 10.0,  # answers may go on for this long after the signal
        lame_s: float = 0.0,  # connections are taken for this long after the signal
        prepare: Prepare | None = None,
        on_ready: Callable[[], None] | None = None,  # called on the event loop
    ) -> None:
        http = build_http(weave, limits, libraries=libraries, keys=keys)
        config = uvicorn.Config(
            http,
            log_config=None,  # ours, see logs.py
            access_log=False,
            timeout_graceful_shutdown=round(patience_s) + LAST_WORDS_S,
        )
        super().__init__(config)
        self._context: Context = http.state.context
        self._patience_s = patience_s
        self._lame_s = lame_s
        self._prepare = prepare
        self._context.preparing = None if prepare is None else prepare.words
        self._on_ready = on_ready
        self._readying: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Begin to stop, from any thread. `run` returns when all is in order."""
        self._context.is_stopping = True
        if self._loop is None or self._lame_s <= 0:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._lame_s, self._exit)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. The second one does not wait."""
        if self._lame_s > 0 and not self._context.is_stopping:
            self._captured_signals.append(sig)
            self.stop()
            return
        self._context.is_stopping = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._readying = asyncio.create_task(self._get_ready())

    async def _get_ready(self) -> None:
        """Nobody who asks waits for this; who looks at /readyz does."""
        if self._prepare is not None:
            try:
                await asyncio.to_thread(self._prepare.work)
            except EngineClosed:
                return  # stopped meanwhile
            except Exception:  # what needs it does it, or says why it cannot
                log.exception("%s failed", self._prepare.words)
                self._context.metrics.not_prepared()
        self._context.preparing = None
        if self._on_ready is not None and not self._context.is_stopping:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.is_stopping = True
        giving_up = asyncio.get_running_loop().call_later(self._patience_s, self._give_up)
        try:
            await super().shutdown(sockets)
        finally:
            giving_up.cancel()

    def _give_up(self) -> None:
        self._context.answers.abandon_all()
        self._context.tasks.stop()
        self._context.writing.stop()

    def _exit(self) -> None:
        self.should_exit = True
