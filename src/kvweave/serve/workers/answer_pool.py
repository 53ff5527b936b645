"""Runs answers on worker threads and brings them to asyncio.

`app` is synchronous: a thread that iterates an answer computes, or waits for the engine. The server
is asynchronous. A request is admitted or refused at once, so that a full server says 429 quickly.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context

from kvweave.app.hosts import PieceStream
from kvweave.app.weave import Answer
from kvweave.serve.access.errors import ApiError, busy
from kvweave.serve.access.limits import Limits
from kvweave.serve.observe.prometheus import PoolCounts, ServerMetrics
from kvweave.serve.observe.tenant_series import TenantSeries
from kvweave.serve.workers.fair_turns import FairTurns
from kvweave.serve.workers.mailbox import Mailbox

log = logging.getLogger(__name__)

GUARANTEED = 4  # answers that a tenant is let in with though others have all places
MORE = 64  # threads for first answers of tenants, beyond those that may run

# On a worker thread. May block and raise: it retrieves, tokenises, checks the prompt.
Start = Callable[[], PieceStream]


class AnswerJob:
    """One admitted answer: read its mailbox, then `abandon` it, whatever happened."""

    def __init__(
        self,
        start: Start,
        meter: ServerMetrics,
        tenants: TenantSeries,
        tenant: str = "",
        *,
        piecewise: bool = True,
    ) -> None:
        """`piecewise`: someone reads the pieces as they come, not the whole answer alone."""
        self.tenant = tenant
        self.mailbox = Mailbox(piecewise=piecewise)
        self._tenants = tenants
        self.answer: Answer | None = None  # once it is finished
        self.queue_s = 0.0  # how long it waited for a worker; known once the mailbox is open
        self._start = start
        self._piecewise = piecewise
        self._meter = meter
        self._admitted_s = time.perf_counter()
        self._abandoned = threading.Event()
        self._answering: PieceStream | None = None  # once it began
        self._context = copy_context()  # the request's id, for the log
        self.outcome: Future[str] = Future()  # which of PoolCounts it was; cancelled: never begun

    def run(self) -> None:
        """On a worker thread. Nothing to a job that was abandoned before."""
        if not self.outcome.set_running_or_notify_cancel():
            return
        try:
            self.outcome.set_result(self._context.run(self._work))
        except BaseException as error:  # a mailbox without a loop: the server was forced to quit
            self.outcome.set_exception(error)

    def abandon(self, why: ApiError | None = None) -> None:
        """Stop between two steps of the engine. Nothing to a job that is done. Any thread.

        `why`, if there is one, is what a reader of the mailbox is told at once; otherwise it hears
        that the server stopped, once the work has.
        """
        self._abandoned.set()
        if (answering := self._answering) is not None:  # else the worker sees the flag when it is
            answering.abort()
        never_began = self.outcome.cancel()
        if why is not None or never_began:
            self.mailbox.fail(why or _stopped_error())

    def current_wait(self) -> dict[str, str | int] | None:
        """What its first token waits for, for JSON; None: not known. Any thread."""
        wait = None if self._answering is None else self._answering.current_wait()
        return None if wait is None else wait._asdict()

    def _work(self) -> str:
        """Compute on a worker thread; return which of PoolCounts this was."""
        outcome, answer = "failed", None
        self.queue_s = time.perf_counter() - self._admitted_s
        self._meter.record_start(self.queue_s)
        try:
            answer = self._compute()
        except Exception as error:  # whatever it is, the waiting reader must hear of it
            self.mailbox.fail(error)
        else:
            outcome = "abandoned" if answer is None else "finished"
            if answer is None:
                log.info("abandoned an answer")
                self.mailbox.fail(_stopped_error())
            else:
                self.answer = answer
                self.mailbox.end(answer)
                self._tenants.record_answer(self.tenant, answer)
        self._meter.record_end(outcome, answer, self.queue_s)
        return outcome

    def _compute(self) -> Answer | None:
        self._answering = answering = self._start()
        try:
            if not self._piecewise:
                answering.take_whole()
            self.mailbox.open()
            pieces, last_s = iter(answering), None
            while not self._abandoned.is_set() and (piece := next(pieces, None)):
                now_s = time.perf_counter()
                self._meter.record_token(None if last_s is None else now_s - last_s)
                self._tenants.record_token(self.tenant)
                last_s = now_s
                self.mailbox.put(piece)
        finally:
            answering.close()
        return answering.answer


class AnswerPool:
    """Admits answers and counts them. Used on the event loop; only the counting is on any thread.

    An answer that its client has left still holds its place until its worker is free of it. Tenants
    take turns (`fair_turns.py`), and each is let in with a few however many others there are.
    """

    def __init__(self, limits: Limits, meter: ServerMetrics, tenants: TenantSeries) -> None:
        self._limits = limits
        self._meter = meter
        self._tenants = tenants
        # more than may run: of every tenant one does
        self._workers = ThreadPoolExecutor(limits.running + MORE, thread_name_prefix="answer")
        self._lock = threading.Lock()  # guards all below
        self._turns: FairTurns[AnswerJob] = FairTurns(limits.running)
        self._jobs: set[AnswerJob] = set()
        self._by_tenant: Counter[str] = Counter()
        self._ended = {"finished": 0, "failed": 0, "abandoned": 0}

    def submit(
        self, starts: Sequence[Start], tenant: str = "", *, piecewise: bool = True
    ) -> list[AnswerJob]:
        """Admit all answers of a tenant's request, or raise a 429 that says when to try again.
        `piecewise`: see `AnswerJob`."""
        jobs = [
            AnswerJob(start, self._meter, self._tenants, tenant, piecewise=piecewise)
            for start in starts
        ]
        with self._lock:
            self._refuse_many(len(jobs), tenant)
            self._jobs |= set(jobs)
            self._by_tenant[tenant] += len(jobs)
            for job in jobs:
                self._turns.put(tenant, job)
        for job in jobs:
            job.outcome.add_done_callback(
                lambda future, job=job: self._leave(job, future)  # type: ignore[misc]
            )
        self._begin()
        return jobs

    def _refuse_many(self, num_new: int, tenant: str) -> None:
        """Lock is held."""
        most, own = self._limits.running + self._limits.waiting, self._by_tenant[tenant] + num_new
        quota = self._limits.tenant_answers
        if quota is not None and own > quota:
            raise busy(f"{own - num_new} of your answers, of at most {quota}, run or wait")
        is_small = tenant and own <= GUARANTEED and len(self._by_tenant) > 1
        if len(self._jobs) + num_new > most and not is_small:
            raise busy(f"{len(self._jobs)} answers of at most {most} are running or waiting")

    def _begin(self) -> None:
        """Give threads to those whose turn it is. Any thread."""
        self._turns.begin(
            self._lock, lambda job: self._workers.submit(self._work, job), AnswerJob.abandon
        )

    def _work(self, job: AnswerJob) -> None:
        try:
            job.run()
        finally:
            with self._lock:
                self._turns.done(job.tenant)
            self._begin()

    def counts(self) -> PoolCounts:
        with self._lock:
            running = min(len(self._jobs), self._turns.num_running)
            return PoolCounts(running, len(self._jobs) - running, **self._ended)

    def under_way(self, tenant: str) -> int:
        """Answers of one tenant that run or wait."""
        with self._lock:
            return self._by_tenant[tenant]

    def abandon_all(self) -> None:
        """Stop every job at the engine's next step; the clients that wait for them get a 503."""
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            job.abandon()

    async def close(self) -> None:
        """Abandon what is left and wait for the workers."""
        self.abandon_all()
        await asyncio.to_thread(self._workers.shutdown)

    def _leave(self, job: AnswerJob, future: "Future[str]") -> None:
        if future.cancelled():
            how = "abandoned"
            self._meter.record_end(how, None, job.queue_s)
        else:  # an exception here is a mailbox without a loop: the server was forced to quit
            how = "failed" if future.exception() is not None else future.result()
        with self._lock:
            if future.cancelled():
                self._turns.drop(job.tenant, job)
            self._jobs.remove(job)
            self._by_tenant[job.tenant] -= 1
            if not self._by_tenant[job.tenant]:
                del self._by_tenant[job.tenant]
            self._ended[how] += 1


def _stopped_error() -> ApiError:
    return ApiError(503, "the server stopped before the answer was finished")
