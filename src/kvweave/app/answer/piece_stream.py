"""An answer in the making, whoever makes it."""

from collections.abc import Callable, Iterator
from typing import Protocol

from kvweave.app.answer.answer_stream import Answer, Piece


class PieceStream(Protocol):
    """An answer in the making: iterate for pieces, then read `answer`. For one thread at a time,
    but for `abort`."""

    answer: Answer | None  # None until it is finished

    def __iter__(self) -> Iterator[Piece]: ...

    def finish(self) -> Answer:
        """Run to the end and return the whole answer."""
        ...

    def take_whole(self) -> None:
        """Nobody reads the pieces: `answer` alone counts, so that it may begin again where what
        computes it fails. Before the first piece."""

    def close(self) -> None:
        """Stop the work."""

    def abort(self) -> None:
        """Stop the work, from any thread; the one that iterates sees the end. Never blocks."""

    def when_closed(self, call: Callable[[], None]) -> None:
        """`call` once this is closed."""
