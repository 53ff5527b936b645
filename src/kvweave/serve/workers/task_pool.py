"""Blocking work that is no answer: uploads, searches, embeddings. A few at once, the others wait.

Writers have a pool of their own: a search never waits for an upload. Those of one knowledge base
take turns before they take a thread, so that writers of other knowledge bases find threads free.

A task runs to its end even if its client has left: half an upload would be of no use. Only a server
that stops ends one in between, where nothing that was acknowledged is lost.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from kvweave.errors import EngineClosed
from kvweave.serve.errors import busy
from kvweave.serve.limits import Limits

T = TypeVar("T")

SHARED = 8  # places, from which on no client may have all of them


Begin = Callable[[Future[Any], Callable[[], object], Hashable], None]  # future, work, turn


class Admission:
    """A place in a TaskPool, taken before the work is known. Give it work, or `leave`."""

    def __init__(self, begin: Begin, give_back: Callable[[], None]) -> None:
        """`begin` runs work when its turn comes; `give_back` frees the place, once."""
        self._begin = begin
        self._give_back = give_back
        self._is_unused = True  # no work was given yet, and it was not left

    def begin(
        self, work: Callable[[], T], on_done: Callable[[], None], turn: Hashable = None
    ) -> "asyncio.Future[T]":
        """Run `work` when its turn comes: after all that was begun before with the same `turn`.

        `on_done` is called once, on some thread, when it is over, failed or dropped unbegun; the
        result may be awaited, or left alone.
        """
        assert self._is_unused, "work is given once, before leaving"
        self._is_unused = False

        def over(_: "Future[T]") -> None:
            on_done()
            self._give_back()

        future: Future[T] = Future()
        future.add_done_callback(over)
        self._begin(future, partial(copy_context().run, work), turn)
        return asyncio.shield(asyncio.wrap_future(future))

    def leave(self) -> None:
        """There will be no work. Nothing to a place that has some."""
        if self._is_unused:
            self._is_unused = False
            self._give_back()


class TaskPool:
    """Admits functions and runs them on threads of its own. Used on the event loop."""

    def __init__(self, limits: Limits, what: str) -> None:
        """`what` they are called in a refusal."""
        self._what = what
        self._most = limits.tasks + limits.waiting_tasks
        self._threads = ThreadPoolExecutor(limits.tasks, thread_name_prefix="task")
        self._lock = threading.Lock()
        self._num_admitted = 0
        self._share = self._most - self._most // 4 if self._most >= SHARED else self._most
        self._by_client: Counter[Hashable] = Counter()
        # of every turn that is taken, the work that waits for it
        self._turns: dict[Hashable, deque[tuple[Future[Any], Callable[[], object]]]] = {}
        self._stopped = threading.Event()

    def admit(self, client: Hashable = None) -> Admission:
        """A place, or a 429. No client has all places, so that another finds one."""
        with self._lock:
            if self._num_admitted >= self._most:
                raise busy(f"{self._most} {self._what} are under way")
            if client is not None and self._by_client[client] >= self._share:
                raise busy(f"{self._share} of your {self._what} are under way")
            self._num_admitted += 1
            self._by_client[client] += 1
        return Admission(self._start, partial(self._leave, client))

    async def run(self, work: Callable[[], T], turn: Hashable = None, client: Hashable = None) -> T:
        """Admit `work` or raise a 429; then its result."""
        return await self.admit(client).begin(work, lambda: None, turn)

    def stop(self) -> None:
        """Have work that asks (see `check`) end where it is."""
        self._stopped.set()

    def check(self) -> None:
        """For work that can end in between: raises EngineClosed once the server gives it up."""
        if self._stopped.is_set():
            raise EngineClosed("the server stopped before all of it was done; send it again")

    @property
    def num_admitted(self) -> int:
        with self._lock:
            return self._num_admitted

    async def close(self) -> None:
        """Drop what has not begun and wait for what has, which ends where it can."""
        self.stop()
        with self._lock:
            unbegun = [future for waiting in self._turns.values() for future, _ in waiting]
            for waiting in self._turns.values():
                waiting.clear()
        for future in unbegun:
            future.cancel()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _start(self, future: Future[Any], work: Callable[[], object], turn: Hashable) -> None:
        if turn is not None:
            with self._lock:
                if turn in self._turns:
                    self._turns[turn].append((future, work))
                    return
                self._turns[turn] = deque()
        self._submit(future, work, turn)

    def _submit(self, future: Future[Any], work: Callable[[], object], turn: Hashable) -> None:
        try:
            ran = self._threads.submit(self._work, future, work, turn)
        except RuntimeError:  # closed meanwhile
            future.cancel()
            return
        ran.add_done_callback(lambda ran: future.cancel() if ran.cancelled() else None)

    def _work(self, future: Future[Any], work: Callable[[], object], turn: Hashable) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        if turn is None:
            return
        with self._lock:
            waiting = self._turns[turn]
            if not waiting:
                del self._turns[turn]
                return
            following = waiting.popleft()
        self._submit(*following, turn)

    def _leave(self, client: Hashable) -> None:
        with self._lock:
            self._num_admitted -= 1
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]
