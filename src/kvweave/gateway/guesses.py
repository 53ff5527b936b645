"""Speculative prefill on a replica: the prompt of a provisional list, for one token.

The replica computes the prompt and keeps it in its cache; what it says is thrown away. If the list
stands, the answer is asked for where its prompt lies. If not, the connection is cut, at which an
engine ends the work.
"""

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress

from kvweave.app.answer.guessing import GuessFigures
from kvweave.errors import KVWeaveError, RequestError, UpstreamError
from kvweave.gateway.bodies import UpstreamRequest, body_of
from kvweave.gateway.connections import Exchange, UpstreamFailed
from kvweave.gateway.fleet import Fleet
from kvweave.gateway.replica import Replica
from kvweave.gateway.replies import ReplyReader, check_status


class PrefillGuess:
    """A `Generation` of app/answer/guessing.py: begun at once, held by its nature. Any thread."""

    def __init__(self, fleet: Fleet, request: UpstreamRequest, threads: ThreadPoolExecutor) -> None:
        self._num_tokens = request.prompt.num_tokens
        self._fleet = fleet
        try:
            self._lease = fleet.lease(request.prompt.routed, may_wait=False)
        except UpstreamError as error:  # of this guess; the answer may wait for an upstream
            raise RequestError(str(error)) from error
        body = body_of(request.prefill_only(), self._lease.card)
        self._exchange: Exchange = self._lease.exchange(request.prompt.path, body)
        self._has_failed = False
        self._is_computed = threading.Event()
        try:
            self._work: Future[None] = threads.submit(self._run)
        except RuntimeError:  # the gateway is stopping
            self._lease.give_back(self._exchange)
            raise

    @property
    def replica(self) -> Replica:
        return self._lease.replica

    @property
    def is_done(self) -> bool:
        """Whether nothing comes of it: it failed."""
        return self._has_failed

    @property
    def is_computed(self) -> bool:
        return self._is_computed.is_set()

    def cancel(self) -> None:
        """Harmless the second time, and once it is computed."""
        self._exchange.cut()
        if self._work.cancel():  # it never began
            self._lease.give_back(self._exchange)

    def release(self) -> None:
        """Its list stands. The answer is asked for by itself."""

    @property
    def figures(self) -> GuessFigures:
        """All of its prompt is saved if it is right, and wasted if it is not."""
        num_tokens = self._num_tokens if self.is_computed else 0
        return GuessFigures(num_tokens, num_tokens)

    def wait(self) -> None:
        """Until its prompt is computed, has failed to be, or is cancelled."""
        with suppress(CancelledError):
            self._work.exception()

    def _run(self) -> None:
        lease, exchange = self._lease, self._exchange
        try:
            status = exchange.begin(self._fleet.cfg.silence_s)
            check_status(exchange, status, lease.replica.name)
            for _ in ReplyReader(exchange, lease.replica.name):
                lease.first_token()
            self._is_computed.set()
            lease.record_success()
        except UpstreamFailed as failure:
            self._has_failed = True
            if not exchange.is_cut:
                lease.record_failure(failure)
        except KVWeaveError:  # it was refused; the answer's own request will say so
            self._has_failed = True
        finally:
            exchange.close()
            lease.give_back(exchange)


class ReadyRequest:
    """A `Generation` that waits for its reader: the last list's, where no guess was right."""

    is_done = False
    figures = GuessFigures()

    def cancel(self) -> None:
        """Nothing was begun."""

    def release(self) -> None:
        """Its reader begins it."""
