"""The tokens of a prompt that the engine computes."""

import threading
from collections.abc import Callable, Iterator

from kvweave.app.answer.guessing import GuessFigures
from kvweave.app.library.runtime import EngineClient
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.sampling import Choice


class TokenStream(Iterator[Choice]):
    """The tokens of an answer. One thread iterates; any may `close`, which ends the work between
    two steps of the engine, whether its prompt waits, loads or is being computed."""

    def __init__(
        self,
        client: EngineClient,
        request: EngineRequest,
        listeners: tuple[Callable[[Ticket], None], ...] = (),
        *,
        is_held: bool = False,
    ) -> None:
        """Submitted when the first token is asked for; one that is held is submitted now, and hands
        nothing out before it is released. `listeners` hear of its ticket with the first token."""
        self._client = client
        self._request = request
        self._listeners = listeners
        self._counted = client.answers.one()
        self._lock = threading.Lock()  # guards the next two
        self._ticket: Ticket | None = None
        self._closed = False
        if is_held:
            self.begin(is_held=True)

    def begin(self, *, is_held: bool = False) -> Ticket | None:
        """Submit it, if that was not done. None: it was closed before."""
        with self._lock:
            if self._closed:
                return None
            if self._ticket is None:
                self._ticket = self._client.engine.submit(self._request, held=is_held)
                self._counted.__enter__()
            return self._ticket

    def __next__(self) -> Choice:
        ticket = self.begin()
        if ticket is None:
            raise StopIteration
        try:
            choice = next(ticket)
            listeners, self._listeners = self._listeners, ()
            for hear in listeners:
                hear(ticket)
            return choice
        except BaseException:  # it is over, or one that heard of it failed
            self.close()
            raise

    def close(self) -> None:
        """No more of it is wanted. Any thread; harmless the second time."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ticket = self._ticket
        if ticket is not None:
            ticket.cancel()
            self._counted.__exit__(None, None, None)

    # ── as a guess ───────────────────────────────────────────────────────────

    @property
    def is_done(self) -> bool:
        return self._ticket is not None and self._ticket.is_done

    def cancel(self) -> None:
        self.close()

    def release(self) -> None:
        if self._ticket is not None:
            self._ticket.release()

    @property
    def figures(self) -> GuessFigures:
        if self._ticket is None:
            return GuessFigures()
        line = self._ticket.timeline
        return GuessFigures(
            line.saved_tokens, line.wasted_tokens, line.prefilled_s, line.finished_s
        )

    def __del__(self) -> None:
        self.close()
