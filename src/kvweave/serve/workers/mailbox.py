"""From one worker thread to one asyncio task.

Pieces that come while the reader is busy wait here and leave together: a slow client costs longer
messages, never a stalled worker.
"""

import asyncio
import threading

from kvweave.app.weave import Answer, Piece


class Mailbox:
    """Carries one answer. Made on the event loop, whose task reads; one thread writes.

    The writer calls `open` once, `put` any number of times and `end` or `fail` once; `fail` may
    come at any time and from any thread, also without `open`: the first one counts. No call of the
    writer's blocks.
    """

    def __init__(self, *, piecewise: bool = True) -> None:
        """Not `piecewise`: nobody takes the pieces, so they are not kept, and nobody is woken up
        before the end."""
        self._loop = asyncio.get_running_loop()
        self._piecewise = piecewise
        self._news = asyncio.Event()  # touched on the loop's thread only
        self._lock = threading.Lock()  # guards all below
        self._is_rung = False  # the reader will look, and has not yet
        self._is_open = False
        self._is_over = False
        self._pieces: list[Piece] = []
        self._answer: Answer | None = None
        self._error: Exception | None = None

    def open(self) -> None:
        """The request is sound; computing begins."""
        with self._lock:
            self._is_open = True
        if self._piecewise:
            self._ring()

    def put(self, piece: Piece) -> None:
        if self._piecewise:
            with self._lock:
                self._pieces.append(piece)
            self._ring()

    def end(self, answer: Answer) -> None:
        with self._lock:
            self._answer, self._is_over = answer, True
        self._ring()

    def fail(self, error: Exception) -> None:
        with self._lock:
            self._error, self._is_over = self._error or error, True
        self._ring()

    async def wait_until_open(self) -> None:
        """Wait for `open`; raise what the writer failed with before."""
        while True:
            self._news.clear()
            with self._lock:
                if self._is_open:
                    return
                if self._error is not None:
                    raise self._error
            await self._news.wait()

    async def take(self) -> list[Piece]:
        """All that came since the last call, at least one piece; empty when the answer is over.

        What the writer failed with is raised after the pieces that came before it.
        """
        while True:
            self._news.clear()  # before the look: news from here on rings again
            with self._lock:
                pieces, self._pieces = self._pieces, []
                if pieces:
                    return pieces
                if self._error is not None:
                    raise self._error
                if self._is_over:
                    return []
            await self._news.wait()

    async def finish(self) -> Answer:
        """Wait for the end; raise what the writer failed with."""
        while await self.take():
            pass
        assert self._answer is not None, "an answer ended without one"
        return self._answer

    def _ring(self) -> None:
        """Once until the reader has looked: waking the loop costs more than all else here. Lock is
        not held: the loop is awake at once, and would wait for it."""
        with self._lock:
            was_rung, self._is_rung = self._is_rung, True
        if not was_rung:
            self._loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        with self._lock:
            self._is_rung = False
        self._news.set()
