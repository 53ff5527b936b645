"""Blocking work that is no answer: uploads, searches, embeddings. A few at once, the others wait.

Writers have a pool of their own: a search never waits for an upload. Those of one knowledge base
take turns before they take a thread, so that writers of other knowledge bases find threads free.
Clients take turns as well (`fair_turns.py`): one with many long tasks leaves others their first.

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
from typing import Any, NamedTuple, TypeVar

from kvweave.errors import EngineClosed
from kvweave.serve.access.errors import busy
from kvweave.serve.access.limits import Limits
from kvweave.serve.workers.fair_turns import FairTurns

T = TypeVar("T")

SHARED = 8  # places, from which on no client may have all of them
MORE = 16  # threads for first tasks of clients, beyond those that may run


Begin = Callable[[Future[Any], Callable[[], object], Hashable], None]  # future, work, turn


class _Task(NamedTuple):
    """Work that was admitted."""

    client: str
    future: Future[Any]
    work: Callable[[], object]
    turn: Hashable  # None: it waits for no other


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
        self._threads = ThreadPoolExecutor(limits.tasks + MORE, thread_name_prefix="task")
        self._lock = threading.Lock()  # guards all below
        self._ready: FairTurns[_Task] = FairTurns(limits.tasks)
        self._futures: set[Future[Any]] = set()  # of what is not over
        self._num_admitted = 0
        self._share = self._most - self._most // 4 if self._most >= SHARED else self._most
        self._by_client: Counter[str | None] = Counter()
        # of every turn that is taken, the work that waits for it
        self._turns: dict[Hashable, deque[_Task]] = {}
        self._stopped = threading.Event()

    def admit(self, client: str | None = None) -> Admission:
        """A place, or a 429. No client has all places, so that another finds one."""
        with self._lock:
            if self._num_admitted >= self._most:
                raise busy(f"{self._most} {self._what} are under way")
            if client is not None and self._by_client[client] >= self._share:
                raise busy(f"{self._share} of your {self._what} are under way")
            self._num_admitted += 1
            self._by_client[client] += 1
        return Admission(partial(self._start, client or ""), partial(self._leave, client))

    async def run(
        self, work: Callable[[], T], turn: Hashable = None, client: str | None = None
    ) -> T:
        """Admit `work` or raise a 429; then its result."""
        return await self.admit(client).begin(work, lambda: None, turn)

    def stop(self) -> None:
        """Have work that asks (see `check`) end where it is."""
        self._stopped.set()

    def check(self) -> None:
        """For work that can end in between: raises EngineClosed once the server gives it up."""
        if self._stopped.is_set():
            raise EngineClosed("the server stopped before all of it was done; send it again")

    async def close(self) -> None:
        """Drop what has not begun and wait for what has, which ends where it can."""
        self.stop()
        with self._lock:
            futures = list(self._futures)
        for future in futures:
            future.cancel()  # nothing to one that runs
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _start(
        self, client: str, future: Future[Any], work: Callable[[], object], turn: Hashable
    ) -> None:
        task = _Task(client, future, work, turn)
        with self._lock:
            self._futures.add(future)
            if turn in self._turns:
                self._turns[turn].append(task)
                return
            if turn is not None:
                self._turns[turn] = deque()
            self._ready.put(client, task)
        self._begin()

    def _begin(self) -> None:
        """Give threads to the tasks whose turn it is. Any thread."""
        self._ready.begin(
            self._lock,
            lambda task: self._threads.submit(self._work, task),
            lambda task: task.future.cancel(),
        )

    def _work(self, task: _Task) -> None:
        try:
            if task.future.set_running_or_notify_cancel():
                task.future.set_result(task.work())
        except BaseException as error:
            task.future.set_exception(error)
        with self._lock:
            self._futures.discard(task.future)
            self._ready.done(task.client)
            waiting = self._turns.get(task.turn)
            if waiting:
                following = waiting.popleft()
                self._ready.put(following.client, following)
            elif waiting is not None:
                del self._turns[task.turn]
        self._begin()

    def _leave(self, client: str | None) -> None:
        with self._lock:
            self._num_admitted -= 1
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]
