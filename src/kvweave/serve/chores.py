"""Blocking work that is no answer: uploads, searches, embeddings. A few at once, the others wait.

A chore runs to its end even if its client has left: half an upload would help no one. Only a server
that stops ends one in between, where nothing that was acknowledged is lost.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from kvweave.errors import EngineClosed
from kvweave.serve.errors import busy
from kvweave.serve.limits import Limits

T = TypeVar("T")


class Chores:
    """Runs functions on threads of its own. Used on the event loop."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.chores + limits.waiting_chores
        self._threads = ThreadPoolExecutor(limits.chores, thread_name_prefix="chore")
        self._lock = threading.Lock()
        self._num_admitted = 0
        self._stopped = threading.Event()

    def begin(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Admit `work` or raise a 429. The result may be awaited, or left alone."""
        with self._lock:
            if self._num_admitted >= self._most:
                raise busy(f"{self._most} uploads, searches or embeddings are under way")
            self._num_admitted += 1
        loop, context = asyncio.get_running_loop(), copy_context()
        return loop.run_in_executor(self._threads, context.run, self._counted, work)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(self.begin(work))

    def stop(self) -> None:
        """Have work that asks (see `check`) end where it is."""
        self._stopped.set()

    def check(self) -> None:
        """For work that can end in between: raises EngineClosed once nobody waits any longer."""
        if self._stopped.is_set():
            raise EngineClosed("the server stopped before all of it was done; send it again")

    @property
    def num_admitted(self) -> int:
        with self._lock:
            return self._num_admitted

    async def close(self) -> None:
        """Drop what has not begun and wait for what has, which ends where it can."""
        self.stop()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _counted(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            with self._lock:
                self._num_admitted -= 1
