"""From a question to the answer in the making, whatever computes it.

    Question ─► Asked ─► Found ─► LaidOut ─► Planned ─► Submitted ─► pieces of text
         take_in   searching    submitting.py, a Target           _mark

`stages.py` has these values and what a target must do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic

from kvweave.app.answer.answer_stream import PieceStream
from kvweave.app.answer.conversations import conversation_name
from kvweave.app.answer.notes import RetrievedChunk
from kvweave.app.answer.question import Question
from kvweave.app.answer.searching import Searcher
from kvweave.app.answer.settings import NO_LIBRARY, AnswerSettings
from kvweave.app.answer.stages import Asked, Found, LaidOut, P, R, Submitted, Target
from kvweave.app.answer.submitting import lay_out, submit
from kvweave.app.answer.wrapped_answers import CitedAnswer, ToolAnswer, tool_sampling
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.search import SearchOptions
from kvweave.engine.sampling import Sampling
from kvweave.errors import ConfigError
from kvweave.text.prompt import past_messages
from kvweave.types import Hit

HISTORY_SHARE = 2  # chunks of earlier turns take at most the context divided by this
MOST_MESSAGES = 6  # of the history, the last ones
MOST_CHARS = 1000  # of one message
LONGEST_QUERY = 400  # characters: what is longer is no question
REWRITE_SAMPLING = Sampling(max_tokens=64, stop=("\n\n",))  # the likeliest words
REWRITE_REQUEST = (
    "Below is a conversation and its last question. Write that question so that it can be "
    "understood without the conversation: put the names of things in place of words like it, that "
    "or they. Write the question alone and do not answer it."
)


class Answerer(Generic[P, R]):
    """Answers through one target and, where one is open, from a knowledge base. Any thread."""

    def __init__(
        self, target: Target[P, R], settings: AnswerSettings, kb: KnowledgeBase | None = None
    ) -> None:
        self._target = target
        self._settings = settings
        self._kb = kb
        self._searcher = None if kb is None else Searcher(kb, target, settings)

    def answer(self, question: Question, called_s: float) -> PieceStream:
        """Find the chunks of a question, or take those it brings, and submit its prompt. Computing
        begins when the first piece is read, or earlier if a search guessed the prompt."""
        asked = self.take_in(question, called_s)
        if asked.is_searched and self._searcher is not None:
            return _mark(asked, self._searcher.submit(asked))
        found = self._take_documents(asked)
        return _mark(asked, submit(self._target, self._settings, asked, found, False))

    def lay_out(self, question: Question, called_s: float) -> LaidOut[P]:
        """Search for a question and lay out its prompt, without planning or submitting it. A
        follow-up may still be rewritten by the model first."""
        asked = self.take_in(question, called_s)
        if asked.is_searched and (searcher := self._searcher) is not None:
            found = self._settings.look_up(lambda: searcher.search(asked))
        else:
            found = self._take_documents(asked)
        return lay_out(asked, found, self._target)

    def search(self, question: str, k: int, how: SearchOptions | None = None) -> list[Hit]:
        """Return the chunks of the knowledge base nearest to a question, best first; found as is
        usual where `how` is None."""
        if self._kb is None:
            raise ConfigError(NO_LIBRARY)
        kb, how = self._kb, how or self._settings.usual.search
        return self._settings.look_up(lambda: kb.search(question, k, how))

    def take_in(self, question: Question, called_s: float) -> Asked:
        """Fill in what a question leaves open, check it, and recall its conversation. If it asks
        for that, a follow-up that is searched for is first rewritten by the model, which is waited
        for. Raises RequestError, ConfigError."""
        is_searched = question.documents is None and self._kb is not None
        whole = self._fill_in(question)
        self._target.check(whole)
        if whole.rewrite and whole.history and is_searched:
            messages = rewriting_messages(whole.question, whole.history)
            text = self._target.say(messages, REWRITE_SAMPLING, whole.tenant)
            whole = replace(whole, query=read_rewritten(text))
        past = past_messages(whole.history)
        name = conversation_name(whole, past, is_searched=self._kb is not None)
        most = self._target.max_context
        recall = partial(
            self._settings.conversations.talk,
            *(whole.tenant, name, past),
            most_tokens=None if most is None else most // HISTORY_SHARE,
        )
        turn = self._target.open_turn(whole, recall)
        is_usual = question.reuse is None and question.ratio is None
        return Asked(whole, called_s, turn, is_searched, is_usual, self._say_order(question, whole))

    def _say_order(self, question: Question, whole: Question) -> str:
        """Whether chunks may move, and who says so; see `Question.fill_in`."""
        if question.order is not None:
            who = "the question"
        elif whole.reuse == "full":
            return f"{whole.permission}: all is computed"
        elif whole.alone:
            return f"{whole.permission}: nothing is read of the knowledge tree"
        elif self._kb is not None and self._kb.settings.order is not None:
            who = "its knowledge base"
        else:
            who = "the configuration"
        return f"{whole.permission}, says {who}"

    def _fill_in(self, question: Question) -> Question:
        """Fill in sampling, tenant, system prompt and options that a question leaves open."""
        settings = self._settings
        sampling = question.sampling or self._target.sampling.sampling()
        kb_order = None if self._kb is None else self._kb.settings.order
        return replace(
            question.fill_in(settings.usual, kb_order),
            sampling=tool_sampling(sampling, question.tool_use),
            tenant=question.tenant or settings.tenant,
            system=settings.system if question.system is None else question.system,
        )

    def _take_documents(self, asked: Asked) -> Found:
        """Take the documents that a question brings, as chunks."""
        documents = asked.question.given_documents
        tokenizer = self._target.tokenizer
        return Found(tuple(RetrievedChunk.from_document(each, tokenizer) for each in documents))


def _mark(asked: Asked, submitted: Submitted) -> PieceStream:
    """Wrap an answer so that it tells calls of tools apart and cites its sources, as the question
    wants. An answer that no model gives stays as it is."""
    answer, question = submitted.answer, asked.question
    if submitted.work is None:  # no model speaks
        return answer
    if (use := question.tool_use) is not None:
        answer = ToolAnswer(answer, use)
    if question.cite:
        answer = CitedAnswer(answer, [chunk.text for chunk in submitted.notes.retrieved])
    return answer


def rewriting_messages(question: str, history: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What the model is asked, as messages of a chat."""
    said = [
        f"{message.get('role')}: {_short(str(message.get('content')))}"
        for message in history[-MOST_MESSAGES:]
        if message.get("content")  # calls of tools are no words
    ]
    content = "\n".join(
        [
            REWRITE_REQUEST,
            "",
            "Conversation:",
            *said,
            "",
            f"Last question: {_short(question)}",
            "Question:",
        ]
    )
    return [{"role": "user", "content": content}]


def read_rewritten(text: str) -> str | None:
    """The query in a model's reply; None: it gave none."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    query = lines[0].removeprefix("Question:").strip().strip('"') if lines else ""
    return query if 0 < len(query) <= LONGEST_QUERY else None


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]} …"
