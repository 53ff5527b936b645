"""Blocking work that is no answer: uploads, searches, embeddings. A few at once, the others wait.

Writers of one knowledge base wait for each other, so they have threads of their own: a search never
stands behind an upload.

A chore runs to its end even if its client has left: half an upload would help no one. Only a server
that stops ends one in between, where nothing that was acknowledged is lost.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from kvweave.errors import EngineClosed
from kvweave.serve.errors import busy
from kvweave.serve.limits import Limits

T = TypeVar("T")


class Admission:
    """A place among the chores, taken before the work is known. Give it work, or `leave`."""

    def __init__(self, chores: "Chores") -> None:
        self._chores: Chores | None = chores

    def begin(self, work: Callable[[], T], on_done: Callable[[], None]) -> "asyncio.Future[T]":
        """Run `work` when its turn comes. `on_done` is called once, on some thread, when it is
        over, failed or dropped unbegun; the result may be awaited, or left alone."""
        chores = self._chores
        assert chores is not None, "work is given once, before leaving"
        future: Future[T] = chores._threads.submit(copy_context().run, work)
        self._chores = None

        def over(_: "Future[T]") -> None:
            on_done()
            chores._leave()

        future.add_done_callback(over)
        return asyncio.shield(asyncio.wrap_future(future))

    def leave(self) -> None:
        """There will be no work. Nothing to a place that has some."""
        chores, self._chores = self._chores, None
        if chores is not None:
            chores._leave()


class Chores:
    """Runs functions on threads of its own. Used on the event loop."""

    def __init__(self, limits: Limits, what: str) -> None:
        """`what` they are called in a refusal."""
        self._what = what
        self._most = limits.chores + limits.waiting_chores
        self._threads = ThreadPoolExecutor(limits.chores, thread_name_prefix="chore")
        self._lock = threading.Lock()
        self._num_admitted = 0
        self._stopped = threading.Event()

    def admit(self) -> Admission:
        """A place, or a 429."""
        with self._lock:
            if self._num_admitted >= self._most:
                raise busy(f"{self._most} {self._what} are under way")
            self._num_admitted += 1
        return Admission(self)

    async def run(self, work: Callable[[], T]) -> T:
        """Admit `work` or raise a 429; then its result."""
        return await self.admit().begin(work, lambda: None)

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

    def _leave(self) -> None:
        with self._lock:
            self._num_admitted -= 1
