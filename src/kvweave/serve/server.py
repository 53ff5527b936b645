"""uvicorn that says when it is ready, and in which answers in the making end in order.

What is to be done before the first answer (`prepare`) is done while connections are taken already:
/healthz says that the process is alive, /readyz that it is not ready yet.

A stopping server first says so on /readyz and refuses new work, for load balancers to notice
(`lame_s`). Then it takes no new connections and lets answers finish for a while (`patience_s`).
Then it gives them up: each client gets its error in the usual shape instead of a broken connection.

A server whose engine hangs or cannot compute (`workers/engine_watch.py`) stops likewise, at once.
Where another process follows it (`keeper.py`), requests whose reply has not begun pass to that one
first, with their connections.
"""

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import uvicorn

from kvweave.app.hosts import ModelHost
from kvweave.app.libraries.libraries import Libraries
from kvweave.errors import EngineClosed
from kvweave.serve.access.connections import GuardedProtocol, guard_connections
from kvweave.serve.access.held import HeldRequest
from kvweave.serve.access.limits import USUAL, Limits
from kvweave.serve.access.origins import AccessRules
from kvweave.serve.http import build_http
from kvweave.serve.routes.context import PageConfig, make_context
from kvweave.serve.routes.model_names import RequestDefaults
from kvweave.serve.workers.engine_watch import EngineWatch

log = logging.getLogger(__name__)

LAST_WORDS_S = 5  # for the errors to go out, before connections are cut
PASS_ON_S = 5.0  # for the event loop to let go of requests
SAME_SIGNAL_S = 1.0  # a service manager and the keeper may both send it


class Prepare(NamedTuple):
    """What a server does before it is ready."""

    words: str  # for /readyz
    work: Callable[[], None]  # on a thread of its own


def settle() -> None:
    """The last step of a process that serves and does nothing else: what is there by now stays, so
    collecting garbage need not walk through it, during which no thread of the process does
    anything."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True, slots=True)
class ServerLifecycle:
    """How a server starts and stops."""

    prepare: Sequence[Prepare] = ()  # one after the other
    on_ready: Callable[[], None] | None = None  # called on the event loop, once it is prepared
    lame_s: float = USUAL.lame_s  # connections are taken for this long after the signal
    patience_s: float = USUAL.grace_s  # and then answers may go on for this long
    stuck_s: float = USUAL.engine_s  # a step of the engine that takes longer hangs; 0: none does
    # hears first that the engine is lost, and why, on the watch's thread: `run` should return soon
    on_broken: Callable[[str], None] | None = None
    # takes requests whose reply has not begun to a process that goes on with them, before their
    # clients hear that the engine is lost; None: there is no such process
    pass_on: Callable[[HeldRequest], None] | None = None
    on_end: Callable[[], None] | None = None  # called where the engine was lost, behind the replies


class Server(uvicorn.Server):
    """Serves one host of a model. `run([listener])` blocks until a signal or `stop`."""

    def __init__(
        self,
        weave: ModelHost,
        *,
        limits: Limits | None = None,
        libraries: Libraries | None = None,
        access: AccessRules | None = None,
        usual: RequestDefaults | None = None,
        lifecycle: ServerLifecycle | None = None,
        page: PageConfig | None = None,
    ) -> None:
        """`limits` None are the usual ones; `libraries` None: no knowledge bases by name;
        `usual` and `page`: see `make_context`; `access` None: no keys, no pages but its own."""
        self._life, limits = lifecycle or ServerLifecycle(), limits or Limits()
        self._context = make_context(weave, limits, libraries=libraries, usual=usual, page=page)
        self._readiness = self._context.readiness
        self._readying: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watches = [  # none of a gateway, which watches its upstreams itself
            EngineWatch(each, self._life.stuck_s, self._on_broken, before_end=self._begin_end)
            for each in weave.engines
        ]
        if self._life.pass_on is not None:
            self._context.trial.watches = self._watches
        self._held: Sequence[HeldRequest] = ()
        self._ended_s = -SAME_SIGNAL_S  # when the last SIGTERM came
        config = uvicorn.Config(
            build_http(self._context, access),
            http=guard_connections(limits.connections, limits.header_s),
            log_config=None,  # ours, see observe/logs.py
            access_log=False,
            timeout_graceful_shutdown=round(self._life.patience_s) + LAST_WORDS_S,
        )
        super().__init__(config)

    @property
    def broken(self) -> str | None:
        """What was wrong with the engine, where `run` returned because of that."""
        return self._readiness.broken

    def resume(self, held: Sequence[HeldRequest]) -> None:
        """Begin with these requests, of a process that is gone. Before `run`."""
        self._held = held

    def _begin_end(self, why: str) -> None:
        """Say that the engine is lost, and let another process have what it can begin again. On the
        watch's thread."""
        self._readiness.broken = why
        if self._life.on_broken is not None:
            self._life.on_broken(why)
        if self._life.pass_on is None or self._loop is None:
            return
        done: Future[list[HeldRequest]] = Future()
        try:
            self._loop.call_soon_threadsafe(self._let_go, done)
        except RuntimeError:
            return  # closed meanwhile
        try:
            given = done.result(PASS_ON_S)
        except TimeoutError:
            if done.cancel():  # too busy: it lets none go any more, and they are told of the loss
                return
            given = done.result()  # it is about to
        for held in given:
            self._life.pass_on(held)
            held.connection.close()

    def _let_go(self, done: "Future[list[HeldRequest]]") -> None:
        for server in self.servers:  # what connects from here on is another process's
            server.close()
        if not done.set_running_or_notify_cancel():
            return  # nobody waits for them: they stay here
        given = [
            connection.let_go()
            for connection in list(self.server_state.connections)
            if isinstance(connection, GuardedProtocol)
        ]
        done.set_result([held for held in given if held is not None])

    def _on_broken(self, why: str) -> None:
        """End the server: those who waited for the engine have heard. On the watch's thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._give_up_broken)

    def _give_up_broken(self) -> None:
        self._context.give_up()
        self.should_exit = True

    def stop(self) -> None:
        """Begin to stop, from any thread. `run` returns when all is in order."""
        self._readiness.is_stopping = True
        if self._loop is None or self._life.lame_s <= 0:
            self.should_exit = True
        else:
            with suppress(RuntimeError):  # it has stopped by itself meanwhile
                self._loop.call_soon_threadsafe(
                    self._loop.call_later, self._life.lame_s, self._exit
                )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. The second one does not wait."""
        if sig == signal.SIGTERM:
            before_s, self._ended_s = self._ended_s, time.monotonic()
            if self._readiness.is_stopping and self._ended_s - before_s < SAME_SIGNAL_S:
                return
        if self._life.lame_s > 0 and not self._readiness.is_stopping:
            self._captured_signals.append(sig)
            self.stop()
            return
        self._readiness.is_stopping = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._readiness.preparing = next((step.words for step in self._life.prepare), None)
        await super().startup(sockets)
        for held in self._held:
            await self._resume(held)
        self._held = ()
        self._readying = asyncio.create_task(self._get_ready())
        for watch in self._watches:
            watch.start()

    async def _resume(self, held: HeldRequest) -> None:
        """Take a connection over, as if what came on it came now."""
        loop = asyncio.get_running_loop()
        protocol: GuardedProtocol = self.config.http_protocol_class(  # type: ignore[call-arg, assignment]
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=loop,
        )
        protocol.resume(held)
        try:
            await loop.connect_accepted_socket(lambda: protocol, held.connection)
        except OSError as error:  # its client has left
            log.info("a request was not tried again: %s", error)
            return
        self._context.metrics.record_resumed()

    async def _get_ready(self) -> None:
        """Requests do not wait for this; a client that looks at /readyz does."""
        for step in self._life.prepare:
            self._readiness.preparing = step.words
            try:
                await asyncio.to_thread(step.work)
            except EngineClosed:
                return  # stopped meanwhile
            except Exception:  # what needs it does it, or says why it cannot
                log.exception("%s failed", step.words)
                self._context.metrics.not_prepared()
        self._readiness.preparing = None
        if self._life.on_ready is not None and not self._readiness.is_stopping:
            self._life.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._readiness.is_stopping = True
        patience_s = 0.0 if self._readiness.broken else self._life.patience_s
        giving_up = asyncio.get_running_loop().call_later(patience_s, self._context.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            giving_up.cancel()
            for watch in self._watches:
                await asyncio.to_thread(watch.close)
            if self._readiness.broken and self._life.on_end is not None:
                await asyncio.to_thread(self._life.on_end)

    def _exit(self) -> None:
        self.should_exit = True
