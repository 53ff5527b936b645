"""uvicorn with manners: it says when it is ready, and answers in the making end in order.

A stopping server takes no new connections and lets answers finish for a while. Then it gives them
up: each client gets its error in the usual shape instead of a broken connection.
"""

import asyncio
import socket
from collections.abc import Callable

import uvicorn

from kvweave.app import Weave
from kvweave.serve.bridge import Limits
from kvweave.serve.http import build_http

LAST_WORDS_S = 5  # for the errors to go out, before connections are cut


class Server(uvicorn.Server):
    """Serves one Weave. `run([listener])` blocks until a signal or `should_exit`."""

    def __init__(
        self,
        weave: Weave,
        *,
        limits: Limits | None = None,
        patience_s: float = 10.0,  # answers may go on for this long after the signal
        on_ready: Callable[[], None] | None = None,  # called on the event loop
    ) -> None:
        http = build_http(weave, limits)
        config = uvicorn.Config(
            http,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=round(patience_s) + LAST_WORDS_S,
        )
        super().__init__(config)
        self._bridge = http.state.bridge
        self._patience_s = patience_s
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        giving_up = asyncio.get_running_loop().call_later(
            self._patience_s, self._bridge.abandon_all
        )
        try:
            await super().shutdown(sockets)
        finally:
            giving_up.cancel()
