"""An answer in which the model may call tools: words and calls, told apart as they come."""

from collections.abc import Iterator
from dataclasses import replace

from kvweave.app.answer.answer_stream import AnswerOver, Piece, PieceStream
from kvweave.engine.sampling import Sampling
from kvweave.text.tool_calls import CALL_CLOSE, CallReader, ToolCall, ToolUse

CALLED = "tool_calls"  # the finish_reason of an answer that calls


class ToolAnswer(AnswerOver):
    """A `PieceStream` with calls in it, over one of plain text."""

    def __init__(self, inner: PieceStream, use: ToolUse) -> None:
        self._reader = CallReader(use)
        super().__init__(inner)

    def _make(self) -> Iterator[Piece]:
        texts: list[str] = []
        calls: list[ToolCall] = []
        for piece in self._inner:
            read = self._reader.push(piece.text)
            texts.append(read.text)
            calls += read.calls
            yield piece._replace(text=read.text)
            yield from (Piece("", call=call) for call in read.calls)
        if self._inner.answer is None:
            return  # it was cut
        read = self._reader.flush()
        texts.append(read.text)
        calls += read.calls
        if read.text:
            yield Piece(read.text)
        yield from (Piece("", call=call) for call in read.calls)
        made = replace(self._inner.answer, text="".join(texts), tool_calls=tuple(calls))
        if calls and made.finish_reason == "stop":
            made = replace(made, finish_reason=CALLED)
        self.answer = made


def tool_sampling(sampling: Sampling, use: ToolUse | None) -> Sampling:
    """How an answer is drawn that may call: a call that must come is held to its schema, and where
    one call is wanted the answer ends with it."""
    if use is None:
        return sampling
    if use.is_forced:
        return replace(sampling, json_schema=use.schema)
    return sampling if use.parallel else replace(sampling, stop=(*sampling.stop, CALL_CLOSE))
