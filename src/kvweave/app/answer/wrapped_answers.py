"""Answers over an answer: calls of tools told apart from words, sentences with their sources."""

from collections.abc import Generator, Sequence
from dataclasses import replace

from kvweave.app.answer.answer_stream import AnswerOver, Piece, PieceStream
from kvweave.corpus.search import STOP_WORDS, WORD
from kvweave.engine.sampling import Sampling
from kvweave.text.tool_calls import CALL_CLOSE, CallReader, ToolCall, ToolUse

CALLED = "tool_calls"  # the finish_reason of an answer that calls


class ToolAnswer(AnswerOver):
    """A `PieceStream` with calls in it, over one of plain text."""

    def __init__(self, inner: PieceStream, use: ToolUse) -> None:
        self._reader = CallReader(use)
        super().__init__(inner)

    def _make(self) -> Generator[Piece, None, None]:
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


ENDS = ".!?"
LEAST_SHARE = 0.5  # of a sentence's words, that its source has
LEAST_WORDS = 2  # in a sentence that is cited


class Citer:
    """Puts markers into a text that comes in pieces, which say where its sentences are from: "It is
    14 cm wide. [1]" For one thread.

    No model is asked for them: small ones forget them or make them up. A sentence gets the number
    of the source that has most of its telling words, if that has at least half of them; `cited_as`
    of a source is the number. Pieces go out as they come; a marker follows the end of its sentence.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """`texts` of the sources, the first one cited as 1."""
        self._words = [_telling(text) for text in texts]
        self._sentence = ""

    def push(self, text: str) -> str:
        """Return this text with a marker behind each sentence that ends in it."""
        made: list[str] = []
        for letter in text:
            is_end = self._sentence.rstrip()[-1:] in ENDS and self._sentence.strip()
            if letter == "\n" or (letter.isspace() and is_end):
                made.append(self._end())
            made.append(letter)
            self._sentence += letter
        return "".join(made)

    def flush(self) -> str:
        """The marker of the last sentence, if it has one."""
        return self._end()

    def _end(self) -> str:
        sentence, self._sentence = self._sentence, ""
        words = _telling(sentence)
        if len(words) < LEAST_WORDS or not self._words:
            return ""
        shares = [len(words & has) / len(words) for has in self._words]
        best = max(shares)
        return f" [{shares.index(best) + 1}]" if best >= LEAST_SHARE else ""


class CitedAnswer(AnswerOver):
    """A `PieceStream` with markers in it, over another one."""

    def __init__(self, inner: PieceStream, texts: Sequence[str]) -> None:
        self._citer = Citer(texts)
        super().__init__(inner)

    def _make(self) -> Generator[Piece, None, None]:
        texts: list[str] = []
        for piece in self._inner:
            cited = piece._replace(text=self._citer.push(piece.text))
            texts.append(cited.text)
            yield cited
        if self._inner.answer is None:
            return  # it was cut
        last = self._citer.flush()
        if last:
            texts.append(last)
            yield Piece(last)
        self.answer = replace(self._inner.answer, text="".join(texts))


def _telling(text: str) -> frozenset[str]:
    return frozenset(WORD.findall(text.lower())) - STOP_WORDS
