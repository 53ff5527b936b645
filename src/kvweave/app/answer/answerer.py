"""From a question to the answer in the making, whatever computes it. See stages.py."""

from typing import Generic

from kvweave.app.answer.answer_stream import PieceStream
from kvweave.app.answer.asking import Asker
from kvweave.app.answer.citations import CitedAnswer
from kvweave.app.answer.question import Question
from kvweave.app.answer.settings import NO_LIBRARY, AnswerSettings
from kvweave.app.answer.sources import RetrievedChunk
from kvweave.app.answer.speculation import Speculation
from kvweave.app.answer.stages import Asked, Found, LaidOut, P, R, Submitted, Target
from kvweave.app.answer.submitting import lay_out, submit
from kvweave.app.answer.tool_answer import ToolAnswer
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.search import SearchOptions
from kvweave.errors import ConfigError
from kvweave.types import Hit


class Answerer(Generic[P, R]):
    """Answers through one target and, where one is open, from a knowledge base. Any thread."""

    def __init__(
        self, target: Target[P, R], settings: AnswerSettings, kb: KnowledgeBase | None = None
    ) -> None:
        self._target = target
        self._settings = settings
        self._kb = kb
        self._asker = Asker(target, settings, kb)
        self._speculation: Speculation | None = None
        if kb is not None:
            self._speculation = Speculation(kb, target, settings)

    def answer(self, question: Question, called_s: float) -> PieceStream:
        """Search for a question and plan its prompt, which is not computed before the first piece
        is read, unless a search guessed it."""
        asked = self._asker.take_in(question, called_s)
        if asked.is_searched and self._speculation is not None:
            return _mark(asked, self._speculation.submit(asked))
        found = self._take_documents(asked)
        return _mark(asked, submit(self._target, self._settings, asked, found, False))

    def lay_out(self, question: Question, called_s: float) -> LaidOut[P]:
        """The prompt of a question, of which nothing is computed."""
        asked = self._asker.take_in(question, called_s)
        if asked.is_searched and (speculation := self._speculation) is not None:
            found = self._settings.look_up(lambda: speculation.search(asked))
        else:
            found = self._take_documents(asked)
        return lay_out(asked, found, self._target)

    def search(self, question: str, k: int, how: SearchOptions | None = None) -> list[Hit]:
        """The chunks of the knowledge base nearest to a question, best first; found as is usual
        where `how` is None."""
        if self._kb is None:
            raise ConfigError(NO_LIBRARY)
        kb, how = self._kb, how or self._settings.usual.search
        return self._settings.look_up(lambda: kb.search(question, k, how))

    def _take_documents(self, asked: Asked) -> Found:
        """The documents that a question brings, as chunks."""
        documents = asked.question.given_documents
        tokenizer = self._target.tokenizer
        return Found(tuple(RetrievedChunk.brought(each, tokenizer) for each in documents))


def _mark(asked: Asked, submitted: Submitted) -> PieceStream:
    """The pieces of an answer, with its calls of tools and its citations."""
    answer, question = submitted.answer, asked.question
    if submitted.work is None:  # no model speaks
        return answer
    if (use := question.tool_use) is not None:
        answer = ToolAnswer(answer, use)
    if question.cite:
        answer = CitedAnswer(answer, [chunk.text for chunk in submitted.notes.retrieved])
    return answer
