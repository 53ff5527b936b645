"""The engine's thread, and the inbox through which all others speak to it.

Whatever is posted, a ticket that changed or a job, is taken in between two steps, in order. The
thread starts with the first of it and ends when there was nothing to do for a while.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from kvweave.engine.lifecycle import Lifecycle
from kvweave.engine.request import Ticket
from kvweave.errors import EngineClosed

log = logging.getLogger(__name__)
T = TypeVar("T")


class Worker:
    """Takes steps while there is work. What it is given it calls on its thread alone."""

    def __init__(
        self, desk: Lifecycle, step: Callable[[], bool], device: torch.device, idle_s: float
    ) -> None:
        """`step` takes in what is new and computes; False: there is nothing to do."""
        self._desk = desk
        self._step = step
        self._device = device
        self._idle_s = idle_s
        self._inbox: deque[Ticket | Callable[[], None]] = deque()
        self._changed = threading.Condition()  # guards the inbox, the thread and closed
        self._thread: threading.Thread | None = None
        self._closed = False

    # ---- any thread

    @property
    def is_awake(self) -> bool:
        return self._thread is not None

    def post(self, item: Ticket | Callable[[], None]) -> None:
        """Something for the thread: a ticket that changed, or a job. Raises EngineClosed."""
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine is closed; open another one to ask")
            self._inbox.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def run_alone(self, job: Callable[[], T]) -> T:
        """Run a job on the thread, between two steps; wait for it and give its result."""
        if threading.current_thread() is self._thread:
            return job()
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # whoever waits must hear of it
                future.set_exception(error)

        self.post(work)
        return future.result()

    def news(self) -> list[Ticket]:
        """Tickets that changed and were not taken in yet."""
        with self._changed:
            return [item for item in self._inbox if isinstance(item, Ticket)]

    def close(self) -> None:
        """End what runs with EngineClosed and stop the thread. Harmless the second time."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # ---- the thread

    def take_in(self) -> None:
        """Hear of every ticket and do every job that was posted before."""
        for _ in range(len(self._inbox)):
            with self._changed:  # one by one: while a job runs, what waits behind it still counts
                item = self._inbox.popleft()
            if isinstance(item, Ticket):
                self._desk.heard_of(item)
            else:
                item()

    def _work(self) -> None:
        """Steps while there is work, then waits for some, then ends."""
        if self._device.index is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # kernels go to the thread's own device
        while True:
            busy = self._guarded_step()
            with self._changed:
                if not busy and not self._inbox and not self._closed:
                    self._changed.wait(self._idle_s)
                if self._closed or not (busy or self._inbox):
                    ending = self._closed
                    if ending or not self._desk.lives:
                        self._thread = None
                        break
        if ending:
            self._end_all(EngineClosed("the engine was closed before the answer was finished"))

    def _guarded_step(self) -> bool:
        """A step whose own failure, which would be a bug, ends all requests and not the thread."""
        try:
            return self._step()
        except Exception as error:
            log.exception("a step failed in a way nobody foresaw")
            self._end_all(error)
            return False

    def _end_all(self, error: BaseException) -> None:
        """Every request ends with `error`; jobs that were asked for still run."""
        with self._changed:
            news = list(self._inbox)
            self._inbox.clear()
        for item in news:
            if not isinstance(item, Ticket):
                item()
        new = [item for item in news if isinstance(item, Ticket)]
        for ticket in [*self._desk.lives, *new]:
            try:
                self._desk.end(ticket, error)
            except Exception:  # a bug that is being reported already; the others must hear too
                log.exception("a request could not give back what it held")
