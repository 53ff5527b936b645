"""What is said where a knowledge base has nothing about a question: no model is asked then, which
would answer from nothing."""

import time
from collections.abc import Callable, Iterator

from kvweave.app.answer.answer_stream import Answer, Piece
from kvweave.app.answer.notes import AnswerNotes
from kvweave.app.answer.stages import Asked, Submitted

NOTHING_TEXT = "Nothing about this was found in the knowledge base."


class SaidAnswer:
    """A `PieceStream` of one piece that is known from the start."""

    def __init__(self, text: str, called_s: float, query: str | None = None) -> None:
        """`called_s` is when the caller asked, by time.perf_counter; `query` what was searched for,
        where that is not the question itself."""
        self.answer: Answer | None = None
        self._text = text
        self._called_s = called_s
        self._query = query
        self._is_aborted = False
        self._on_close: Callable[[], None] | None = None
        self._pieces = self._make()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def finish(self) -> Answer:
        for _ in self._pieces:
            pass
        assert self.answer is not None, "an answer was closed before it was finished"
        return self.answer

    def take_whole(self) -> None:
        """There is nothing to begin again."""

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def abort(self) -> None:
        self._is_aborted = True

    def when_closed(self, call: Callable[[], None]) -> None:
        self._on_close = call

    def _make(self) -> Iterator[Piece]:
        if self._is_aborted:
            return
        yield Piece(self._text)
        taken_ms = (time.perf_counter() - self._called_s) * 1e3
        self.answer = Answer(
            text=self._text,
            finish_reason="stop",
            prompt_tokens=0,
            completion_tokens=0,
            ttft_ms=taken_ms,
            total_ms=taken_ms,
            nothing_found=True,
            query=self._query,
        )


def say_nothing_found(asked: Asked, text: str | None) -> Submitted:
    """Answer a question that nothing was found for, in `text` or in the usual words."""
    said = SaidAnswer(text or NOTHING_TEXT, asked.called_s, asked.question.query)
    return Submitted(said, AnswerNotes())
