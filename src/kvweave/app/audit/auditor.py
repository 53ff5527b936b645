"""Chooses fused answers, has them computed exactly when nothing else is to do, and compares.

A chosen request is watched: the engine keeps what the model thought at its first tokens. Once it is
answered, a background request computes the same prompt exactly, with the same tokens put in its
mouth, and the two are compared token by token, KL(full ‖ fused). Calibration feeds full prefill's
own greedy answer; here it is the answer that was given. The exact pass goes through the knowledge
tree and leaves its path there.
"""

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from kvweave.app.audit.audit_log import AuditLog, AuditNote
from kvweave.app.library.runtime import EngineClient
from kvweave.calibrate.trials import judge
from kvweave.config import QualitySettings
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.errors import EngineClosed
from kvweave.metrics import Metrics

log = logging.getLogger(__name__)

WATCHED_TOKENS = 16  # of an answer at most: each is a float per word of the vocabulary
MOST_OUTSTANDING = 4  # answers that wait to be audited
OPEN_TIMES = 4  # what is not known to be within the bound, nor over it, is chosen more often
LOOK_S = 0.2  # how often one who waits looks whether all is over
CLOSE_WAIT_S = 10.0  # more than a step takes


class AuditSampler:
    """Says which answers are audited: one of each 1 / rate, at a place drawn by a seeded generator,
    so that no rhythm of the requests is met. One thread at a time."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a sample, no secret
        self._credit = 0.0
        self._stratum = 0
        self._next = self._random.random()

    def draw(self, rate: float) -> bool:
        """An answer came that is to be audited at this rate."""
        self._credit += rate
        if self._credit <= self._next:
            return False
        self._stratum += 1
        self._next = self._stratum + self._random.random()
        return True


class _AuditCase(NamedTuple):
    """An answer that is to be audited."""

    ticket: Ticket  # watched
    bound: float  # nats per token that its caller allowed
    is_planned: bool  # else the user named its strategy


class AuditWatch(NamedTuple):
    """A fused request, and what is to be done about its audit."""

    note: AuditNote
    request: EngineRequest  # watched, if it was chosen
    listeners: tuple[Callable[[Ticket], None], ...]  # hear of its first token


class Auditor:
    """Audits one knowledge base, or documents without one. Any thread; nothing here waits but
    `wait` and `close`. At most MOST_OUTSTANDING answers hold their distributions."""

    def __init__(
        self,
        client: EngineClient,
        quality: QualitySettings,
        open_log: Callable[[Metrics], AuditLog],
        catch_up: Callable[[], None],
    ) -> None:
        """`quality` says how much is audited. `open_log` is called once, on first use. `catch_up`
        hears of deletions by other processes; an answer whose chunks were deleted is not
        audited."""
        self.metrics = Metrics()
        self._client = client
        self._share, self._per_minute = quality.audit_share, quality.audit_per_minute
        self._open_log = open_log
        self._catch_up = catch_up
        self._opening = threading.Lock()
        self._log: AuditLog | None = None
        self._sampler = AuditSampler()
        self._lock = threading.Lock()  # guards all below
        self._idle = threading.Condition(self._lock)
        self._outstanding = 0
        self._begun_s: deque[float] = deque(maxlen=max(1, self._per_minute))
        self._under_way: Ticket | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._queue: queue.SimpleQueue[_AuditCase | None] = queue.SimpleQueue()
        self._warned: set[tuple[str, float]] = set()

    @property
    def log(self) -> AuditLog:
        """What was found so far."""
        with self._opening:
            if self._log is None:
                self._log = self._open_log(self.metrics)
            return self._log

    def watch(
        self, request: EngineRequest, bound: float, *, is_planned: bool = True
    ) -> AuditWatch | None:
        """Choose whether a fused request is audited; None: it is not fused. `is_planned`: the gate
        let it through within `bound`; else its strategy was named, and a breach is only told."""
        part = request.fused
        if part is None:
            return None
        name, ratio = part.strategy.name, part.ratio
        figures = self.log.figures(name, ratio)
        is_chosen = self._choose(self.log.is_open_question(name, ratio, bound))
        note = AuditNote(is_chosen, figures)
        if not is_chosen:
            return AuditWatch(note, request, ())
        watched = replace(request, watched=WATCHED_TOKENS)
        return AuditWatch(note, watched, (partial(self._begin, bound, is_planned),))

    def wait(self, timeout_s: float) -> bool:
        """Until no answer waits to be audited. False: it takes longer."""
        with self._idle:
            return self._idle.wait_for(lambda: self._outstanding == 0, timeout_s)

    def close(self) -> None:
        """Audit no more; what is under way is given up. Harmless the second time."""
        with self._lock:
            self._is_closed = True
            thread, under_way = self._thread, self._under_way
        if under_way is not None:
            under_way.cancel()
        self._queue.put(None)
        if thread is not None:
            thread.join(CLOSE_WAIT_S)
        if self._log is not None:
            self._log.save()

    def _choose(self, is_open_question: bool) -> bool:
        """Whether an answer is to be audited; one more likely that may settle something."""
        now_s = time.monotonic()
        rate = min(1.0, self._share * (OPEN_TIMES if is_open_question else 1))
        with self._lock:
            if self._is_closed or not self._sampler.draw(rate):
                return False
            is_full = len(self._begun_s) == self._begun_s.maxlen
            if self._per_minute < 1 or (is_full and now_s - self._begun_s[0] < 60.0):
                return False
            if self._outstanding >= MOST_OUTSTANDING:
                return False
            self._begun_s.append(now_s)
            return True

    def _begin(self, bound: float, is_planned: bool, ticket: Ticket) -> None:
        """The first token of a watched answer is there."""
        case = _AuditCase(ticket, bound, is_planned)
        with self._lock:
            if self._is_closed or self._outstanding >= MOST_OUTSTANDING:
                return
            self._outstanding += 1
            self._queue.put(case)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="audit", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while (case := self._queue.get()) is not None:
            why: str | None = "failed"
            try:
                why = self._audit(case)
            except EngineClosed:
                why = "closed"
            except Exception:  # what the device raises: answers go on, and it must be seen
                log.exception("an answer could not be audited")
            finally:
                case.ticket.distributions.clear()
                if why is not None:
                    self.metrics.count("audit_dropped_total", why=why)
                with self._idle:
                    self._outstanding -= 1
                    self._idle.notify_all()

    def _audit(self, case: _AuditCase) -> str | None:
        """Audit one answer. Returns why it was not."""
        ticket = case.ticket
        if not self._wait_for(ticket):
            return "closed"
        record, part = ticket.record, ticket.request.fused
        assert part is not None, "only fused answers are watched"
        num_tokens = min(len(ticket.distributions), len(ticket.watched_ids))
        if record is None or not num_tokens:
            return "unanswered"
        name, ratio = part.strategy.name, part.ratio
        if not record.counts["reused"]:  # exact in the end: calibration counts such answers, too
            self.log.add(name, ratio, 0.0, flipped=False)
            return None
        self._catch_up()
        if self._is_deleted(ticket.request):
            return "deleted"
        answer = tuple(ticket.watched_ids[:num_tokens])
        exact = self._submit(_make_exact(ticket.request, answer))
        try:
            if exact is None or not self._wait_for(exact) or exact.is_cancelled:
                return "closed"
            if len(exact.distributions) < num_tokens:
                deque(exact, maxlen=0)  # raises what ended it
                return "failed"
            full = torch.stack(exact.distributions)
            score = judge(full, torch.stack(ticket.distributions[:num_tokens]), answer)
        finally:
            if exact is not None:
                exact.distributions.clear()
        self.log.add(name, ratio, score.kl_mean, flipped=score.first_flips)
        self.log.save()
        if not case.is_planned:
            self._tell(name, ratio, case.bound)
        return None

    def _submit(self, request: EngineRequest) -> Ticket | None:
        """A request, under way from now on. None: all is over."""
        with self._lock:
            if self._is_closed:
                return None
            self._under_way = self._client.engine.submit(request)
            return self._under_way

    def _wait_for(self, ticket: Ticket) -> bool:
        """Until a ticket is done. False: all is over; it is cancelled if it was the audit's."""
        while not ticket.wait(LOOK_S):
            if self._is_closed:
                return False
        return not self._is_closed

    def _is_deleted(self, request: EngineRequest) -> bool:
        as_of, is_gone = request.as_of, partial(self._client.is_gone, namespace=request.namespace)
        return as_of is not None and any(is_gone(chunk.id, as_of) for chunk in request.chunks)

    def _tell(self, strategy: str, ratio: float, bound: float) -> None:
        """Say once that a strategy that the user named is over the bound: it stays."""
        if (strategy, ratio) in self._warned or not self.log.is_over(strategy, ratio, bound):
            return
        self._warned.add((strategy, ratio))
        figures = self.log.figures(strategy, ratio)
        log.warning(
            "audit: %s at ratio %g costs %.3g nats per token over %d answers and flipped %d first "
            "tokens, more than the bound of %g allows; name a larger ratio, or reuse auto",
            *(strategy, ratio, figures.kl, figures.answers, figures.flips, bound),
        )


def _make_exact(request: EngineRequest, answer: tuple[int, ...]) -> EngineRequest:
    """Make a request for this prompt and answer without anything approximate, for idle time."""
    exact = replace(request, fused=None, use_tree=True, background=True)
    return replace(exact, forced=answer, watched=len(answer))
