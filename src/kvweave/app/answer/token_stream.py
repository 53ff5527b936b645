"""A prompt on its way through the engine: what is submitted, and the tokens that come back.

Submission ─► TokenStream ─► Engine.submit ─► Ticket ─► tokens
"""

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvweave.app.notes import AnswerNotes
from kvweave.app.runtime import EngineClient
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.sampling import Choice
from kvweave.text.prompt import Prompt

OnFirst = Callable[[Ticket], None]  # hears of a ticket when its first token is there


class Submission(NamedTuple):
    """A prompt that is ready for the engine, and what is to be noted about it."""

    prompt: Prompt  # its chunks in the order that the engine is given
    request: EngineRequest
    notes: AnswerNotes
    on_first: tuple[OnFirst, ...]  # called in this order, on the thread that reads the tokens

    def also(self, *on_first: OnFirst) -> "Submission":
        """The same, with more to hear of its first token."""
        return self._replace(on_first=(*self.on_first, *on_first))


class TokenStream(Iterator[Choice]):
    """The tokens of an answer. One thread iterates; any may `close`, which ends the work between
    two steps of the engine, whether its prompt waits, loads or is being computed."""

    def __init__(
        self,
        client: EngineClient,
        request: EngineRequest,
        on_first: tuple[OnFirst, ...] = (),
        *,
        ticket: Ticket | None = None,
    ) -> None:
        """Submitted when the first token is asked for, unless it has a `ticket` already."""
        self._client = client
        self._request = request
        self._on_first = on_first
        self._counted = client.answers.one()
        self._lock = threading.Lock()  # guards the next two
        self._ticket = ticket
        self._closed = False
        if ticket is not None:
            self._counted.__enter__()

    def begin(self) -> Ticket | None:
        """Submit it, if that was not done. None: it was closed before."""
        with self._lock:
            if self._closed:
                return None
            if self._ticket is None:
                self._ticket = self._client.engine.submit(self._request)
                self._counted.__enter__()
            return self._ticket

    def __next__(self) -> Choice:
        ticket = self.begin()
        if ticket is None:
            raise StopIteration
        try:
            choice = next(ticket)
            on_first, self._on_first = self._on_first, ()
            for hear in on_first:
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

    def __del__(self) -> None:
        self.close()
