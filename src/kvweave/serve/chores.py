"""Blocking work that is no answer: uploads, searches, embeddings. A few at once, the others wait.

A chore runs to its end even if its client has left: half an upload would help no one.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

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

    @property
    def num_admitted(self) -> int:
        with self._lock:
            return self._num_admitted

    async def close(self) -> None:
        """Drop what has not begun and wait for what has."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _counted(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            with self._lock:
                self._num_admitted -= 1
