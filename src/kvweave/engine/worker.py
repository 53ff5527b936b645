"""The engine's thread: handles messages, then takes a step, while there is work.

What other threads post is handled between two steps, in order. The thread starts with the first
message and ends when there was nothing to do for a while.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from kvweave.engine.common_steps import CommonSteps
from kvweave.engine.inbox import Inbox
from kvweave.engine.lifecycle import Lifecycle, Message
from kvweave.engine.own_steps import OwnSteps
from kvweave.engine.request import Ticket
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import EngineSequence
from kvweave.errors import EngineClosed

log = logging.getLogger(__name__)
T = TypeVar("T")


class Pulse(NamedTuple):
    """State of the engine thread, for those who watch it."""

    step_s: float  # since the step at hand began, or had computed a layer; 0: it is between two
    failed_in_row: int  # requests that failed since the last token was handed out


@dataclass(eq=False)
class Worker:
    """Owns the engine thread. All that it is given is used on that thread alone, except the
    inbox."""

    _inbox: Inbox[Message]
    _lifecycle: Lifecycle
    _scheduler: Scheduler[EngineSequence]
    _common_steps: CommonSteps
    _own_steps: OwnSteps
    _device: torch.device
    _idle_s: float  # without work, after which the thread ends
    _thread: threading.Thread | None = None  # guarded by the inbox's condition
    _step_from_s: float | None = None  # when the step at hand began
    # of jobs that wait or run; guarded by it too
    _futures: set[Future[Any]] = field(default_factory=set)
    is_abandoned: bool = False  # whether `abandon` was called

    # ---- any thread

    def pulse(self) -> Pulse:
        """Return how long the step at hand has taken, and how many requests failed in a row."""
        from_s = self._step_from_s
        step_s = 0.0 if from_s is None else time.monotonic() - from_s
        return Pulse(step_s, self._lifecycle.failed_in_row)

    def beat(self) -> None:
        """Note that the step at hand gets on: its time counts from now.

        The engine thread calls this after every layer, because a whole prompt may be one step.
        Raises StepGivenUp if the step should stop here.
        """
        if self._step_from_s is not None:
            self._step_from_s = time.monotonic()
        self._common_steps.reach_layer()

    def abandon(self, error: BaseException) -> None:
        """Give up on a thread that hangs: end everybody who waits for it with `error`, and accept
        nothing more.

        What the thread holds is lost; the thread itself cannot be ended.
        """
        with self._inbox.changed:
            self.is_abandoned = True
            self._inbox.close()
            futures = list(self._futures)
            tickets = [each for each in self._inbox.peek() if isinstance(each, Ticket)]
        for future in futures:
            _fail(future, error)
        for ticket in [*list(self._lifecycle.sequences), *tickets]:
            ticket.end(error)

    def post(self, message: Message) -> None:
        """Post a message to the inbox, and start the thread if it does not run. Raises
        EngineClosed.

        The engine's own helpers post to the inbox directly: the thread does not end before it has
        handled what is under way.
        """
        with self._inbox.changed:
            self._inbox.post(message)
            if self._thread is None:
                self._start()

    def run_alone(self, job: Callable[[], T]) -> T:
        """Run a job on the thread, between two steps; wait for it and return its result."""
        if threading.current_thread() is self._thread:
            return job()
        future: Future[T] = Future()

        def work() -> None:
            try:
                done = job()
            except BaseException as error:  # the waiting thread must hear of it
                _fail(future, error)
                return
            with suppress(InvalidStateError):  # abandoned meanwhile
                future.set_result(done)

        with self._inbox.changed:
            self.post(work)
            self._futures.add(future)
        try:
            return future.result()
        finally:
            with self._inbox.changed:
                self._futures.discard(future)

    def wait_for_end(self, seconds: float) -> None:
        """Wait for the thread of an engine that was closed or abandoned, so long at most."""
        with self._inbox.changed:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def close(self) -> None:
        """End what runs with EngineClosed and stop the thread. Harmless the second time."""
        with self._inbox.changed:
            self._inbox.close()
            thread = self._thread
        if self.is_abandoned:
            return  # it may never end
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        """Start the thread. The caller holds the inbox's condition."""
        self._thread = threading.Thread(target=self._run_thread, name="engine", daemon=True)
        self._thread.start()

    # ---- the thread

    def _take_step(self) -> bool:
        """Handle the messages, then take one step. False: there is nothing to do."""
        own_steps = self._own_steps
        own_steps.finish_step()  # an own step that failed has left it
        self._handle_messages()
        if not self._scheduler.has_own_step:
            own_steps.finish_prompt()
        slices = self._scheduler.next_step()  # ints and lists only
        if not slices:
            return self._lifecycle.do_idle_work()
        first = slices[0].sequence
        if first.progress.own_step:
            own_steps.take(first)  # a fused prompt is laid out
        else:
            self._common_steps.take(slices)  # one forward pass for all
            own_steps.count_common_step()
        return True

    def _handle_messages(self) -> None:
        """Act on all messages that were posted before this call."""
        for _ in range(len(self._inbox)):  # one by one: what waits behind a job still counts
            message = self._inbox.take()
            if callable(message):  # a job finds the device at rest
                self._own_steps.finish_prompt()
            self._lifecycle.handle(message)
            self.beat()

    def _run_thread(self) -> None:
        """Run the engine thread from start to end.

        If an unexpected error ends it, its requests end with that error and the next work starts
        another thread.
        """
        try:
            self._take_steps()
        except BaseException as error:
            log.critical("the engine thread died; the next request has another", exc_info=error)
            self._step_from_s = None
            if not isinstance(error, Exception):  # for readers, who are given one
                error = RuntimeError(f"the engine thread died: {type(error).__name__} {error}")
            self._end_all(error)
            with self._inbox.changed:
                self._thread = None
                if self._inbox and not self._inbox.is_closed:  # came meanwhile
                    self._start()

    def _take_steps(self) -> None:
        """Take steps while there is work, then wait for more, and return after an idle time or when
        the engine is closed."""
        device, inbox = self._device, self._inbox
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # kernels go to the thread's own device
        while True:
            busy = self._take_guarded_step()
            with inbox.changed:
                if not busy and not inbox and not inbox.is_closed:
                    due_s = self._lifecycle.idle_work_due_s
                    inbox.changed.wait(self._idle_s if due_s is None else due_s)
                ending = inbox.is_closed
                if ending or (not busy and not inbox and self._lifecycle.is_idle):
                    self._thread = None
                    break
        if ending:
            self._end_all(EngineClosed("the engine was closed before the answer was finished"))

    def _take_guarded_step(self) -> bool:
        """Take a step. If the step itself fails, which would be a bug, all requests end and the
        thread goes on."""
        self._step_from_s = time.monotonic()
        try:
            return self._take_step()
        except Exception as error:
            log.exception("a step failed, which is a bug")
            self._end_all(error)
            return False
        finally:
            self._step_from_s = None

    def _end_all(self, error: BaseException) -> None:
        """End every request with `error`. Jobs that were posted still run."""
        self._own_steps.forget()
        messages = [self._inbox.take() for _ in range(len(self._inbox))]
        for message in messages:
            if not isinstance(message, Ticket):
                self._lifecycle.handle(message)
        new = [message for message in messages if isinstance(message, Ticket)]
        for ticket in [*self._lifecycle.sequences, *new]:
            try:
                self._lifecycle.end(ticket, error)
            except Exception:  # a bug that is being reported already; the others must hear too
                log.exception("a request could not give back what it held")


def _fail(future: "Future[Any]", error: BaseException) -> None:
    """Give a waiting thread `error`, unless its job has a result already."""
    with suppress(InvalidStateError):  # it has its result, or was failed before
        future.set_exception(error)
