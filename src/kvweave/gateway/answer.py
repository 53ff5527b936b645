"""An answer that a replica computes: one attempt after another until one gets through.

A replica that fails before anything was handed out costs the client nothing but time: another one
is asked, as far as the budget of retries goes. Where nobody reads the pieces (`take_whole`), that
holds up to the very end of the answer.
"""

import threading
import time
from collections.abc import Generator, Iterator

from kvweave.app.answer.answer_stream import Answer, Piece, PieceStream
from kvweave.app.answer.notes import AnswerNotes, UpstreamNote, routed_sources
from kvweave.app.answer.stages import Listener
from kvweave.app.answer.wrapped_answers import CALLED
from kvweave.errors import UpstreamError, UpstreamRefusal
from kvweave.gateway.bodies import UpstreamRequest, body_of
from kvweave.gateway.connections import Exchange, UpstreamFailed
from kvweave.gateway.fleet import Fleet, ReplicaLease
from kvweave.gateway.guesses import PrefillGuess
from kvweave.gateway.replica import Replica
from kvweave.gateway.replies import MALFORMED, ReplyReader, UpstreamEnd, check_status


class RoutedAnswer(PieceStream):
    """The answer of a replica. Nothing is sent before the first piece is asked for."""

    def __init__(
        self,
        fleet: Fleet,
        request: UpstreamRequest,
        notes: AnswerNotes,
        listeners: tuple[Listener, ...] = (),
        guess: PrefillGuess | None = None,
    ) -> None:
        """`listeners` hear of the lease of a replica with the first token. The replica of `guess`
        has the prompt, or soon will."""
        self._fleet = fleet
        self._request = request
        self._notes = notes
        self._listeners = listeners
        self._guess = guess
        self._is_whole = False
        self._lock = threading.Lock()  # guards the next two
        self._exchange: Exchange | None = None
        self._is_aborted = False
        super().__init__()

    def take_whole(self) -> None:
        self._is_whole = True

    def abort(self) -> None:
        with self._lock:
            self._is_aborted = True
            exchange = self._exchange
        if self._guess is not None:
            self._guess.cancel()  # whoever waits for it, waits no longer
        if exchange is not None and self.answer is None:
            exchange.cut()

    def _make(self) -> Generator[Piece, None, None]:
        fleet, most = self._fleet, self._fleet.cfg.retries
        fleet.budget.count_request()
        guess = self._guess
        if guess is not None:
            guess.wait()  # `abort` ends it
        first = None if guess is None else guess.replica
        tried: list[Replica] = []
        while not self._is_aborted:
            lease = self._lease(tried, first)
            if lease is None:
                return
            tried.append(lease.replica)
            attempt = _Attempt(lease, self._request, self._notes, len(tried))
            try:
                yield from self._one(attempt)
                return
            except UpstreamFailed as failure:
                if self._is_aborted:
                    return
                lease.record_failure(failure)
                if attempt.has_begun and not self._is_whole:
                    raise UpstreamError(f"{failure}; ask again") from failure
                if len(tried) > most or not fleet.budget.take():
                    raise _last_word(failure, len(tried), most) from failure
                fleet.metrics.count("upstream_retries_total", upstream=lease.replica.name)
            finally:
                lease.give_back(attempt.exchange)

    def _lease(self, tried: list[Replica], first: Replica | None) -> ReplicaLease | None:
        """None: nobody waits for the answer any more. Raises UpstreamError."""
        prompt = self._request.prompt.routed
        try:
            return self._fleet.lease(
                prompt, tried=tried, first=first, is_off=lambda: self._is_aborted
            )
        except UpstreamError:
            if self._is_aborted:
                return None
            raise

    def _one(self, attempt: "_Attempt") -> Iterator[Piece]:
        exchange = attempt.exchange
        with self._lock:
            if self._is_aborted:
                return
            self._exchange = exchange
        try:
            for piece in attempt.pieces(self._fleet.cfg.silence_s):
                listeners, self._listeners = self._listeners, ()
                for hear in listeners:
                    hear(attempt.lease)
                yield piece
        except UpstreamRefusal:
            attempt.lease.record_success()  # it is well, and said no
            raise
        finally:
            exchange.close()
        attempt.lease.record_success()
        self.answer = attempt.answer()


class _Attempt:
    """One replica's try."""

    def __init__(
        self, lease: ReplicaLease, request: UpstreamRequest, notes: AnswerNotes, number: int
    ) -> None:
        self.lease = lease
        self.has_begun = False  # a piece was handed out
        self.exchange = lease.exchange(request.prompt.path, body_of(request, lease.card))
        self._request = request
        self._notes = notes
        self._number = number
        self._first_s: float | None = None
        self._given: list[Piece] = []
        self._end = UpstreamEnd()

    def pieces(self, silence_s: float) -> Iterator[Piece]:
        """Raises UpstreamFailed, UpstreamRefusal."""
        name = self.lease.replica.name
        check_status(self.exchange, self.exchange.begin(silence_s), name)
        reader = ReplyReader(self.exchange, name)
        for piece in reader:
            if self._first_s is None:
                self._first_s = time.perf_counter()
                self.lease.first_token()
            self.has_begun = True
            self._given.append(piece)
            yield piece
        self._end = reader.end

    def answer(self) -> Answer:
        end, notes, now_s = self._end, self._notes, time.perf_counter()
        prompt = self._request.prompt
        self._note_loaded()
        calls = tuple(piece.call for piece in self._given if piece.call is not None)
        reason = end.finish_reason or "stop"
        note = UpstreamNote(
            upstream=self.lease.replica.name,
            attempts=self._number,
            matched_tokens=sum(self.lease.match),
            cached_tokens=end.cached_tokens,
            chunks=prompt.spans,
            left_out=notes.left_out,
            retrieve_ms=notes.retrieve_ms,
            ordered_by=notes.ordered_by,
            told=end.told,
            # a vLLM counts what was fused as cached, and in a stream says no more
            may_be_fused=self.lease.card.fuses and bool(prompt.spans),
        )
        return Answer(
            text="".join(piece.text for piece in self._given),
            finish_reason=CALLED if calls and reason == "stop" else reason,
            prompt_tokens=_prefer(end.prompt_tokens, prompt.num_tokens),
            completion_tokens=_prefer(end.completion_tokens, len(self._given)),
            ttft_ms=((self._first_s or now_s) - notes.called_s) * 1e3,
            total_ms=(now_s - notes.called_s) * 1e3,
            logprobs=tuple(p.logprob for p in self._given if p.logprob is not None),
            speculation=notes.speculation,
            not_guessed=notes.not_guessed,
            order=notes.order,
            stopped_because=end.stopped_because,
            sources=routed_sources(notes.retrieved, prompt.places),
            query=notes.query,
            tool_calls=calls,
            upstream=note,
        )

    def _note_loaded(self) -> None:
        """Keep which chunks the replica says it has loaded the KV of."""
        starts = self._end.told.get("loaded")
        if isinstance(starts, list):
            places = self._request.prompt.places.items()
            found = [chunk_id for chunk_id, (start, _) in places if start in starts]
            self.lease.replica.loaded.note(self._request.tenant, found)


def _prefer(told: int | None, guess: int) -> int:
    return guess if told is None else told


def _last_word(failure: UpstreamFailed, num_tried: int, most: int) -> Exception:
    """What the client is told when there is no further attempt."""
    if failure.status == 429:
        return UpstreamRefusal(429, str(failure), code="rate_limit_exceeded")
    how = f"{num_tried} attempts" if num_tried > most else "the budget of retries is used up"
    if failure.status == MALFORMED:
        return UpstreamRefusal(MALFORMED, f"{failure} ({how})", code="bad_gateway")
    return UpstreamError(f"{failure} ({how}); try again in a moment")
