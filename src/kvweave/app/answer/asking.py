"""Question ─► Asked: what it leaves open is filled in, and its conversation is recalled."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvweave.app.answer.question import Question
from kvweave.app.answer.recognised import conversation_name
from kvweave.app.answer.rewriting import SAMPLING, read_rewritten, rewriting_messages
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.answer.stages import Asked, Target
from kvweave.app.answer.tool_answer import tool_sampling
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.text.prompt import past_messages

HISTORY_SHARE = 2  # a part of the context: more is not taken by chunks of earlier turns


@dataclass(frozen=True, slots=True)
class Asker:
    """Takes questions in. Any thread."""

    target: Target[Any, Any]
    settings: AnswerSettings
    kb: KnowledgeBase | None

    def take_in(self, question: Question, called_s: float) -> Asked:
        """Fill in what a question leaves open. A follow-up is rewritten by the model where that is
        asked for. Raises RequestError and ConfigError."""
        is_searched = question.documents is None and self.kb is not None
        filled = self._fill_in(question)
        self.target.check(filled)
        if filled.rewrite and filled.history and is_searched:
            messages = rewriting_messages(filled.question, filled.history)
            query = read_rewritten(self.target.say(messages, SAMPLING, filled.tenant))
            filled = replace(filled, query=query)
        past = past_messages(filled.history)
        name = conversation_name(filled, past, is_searched=self.kb is not None)
        most = self.target.max_context
        recall = partial(
            self.settings.conversations.talk,
            *(filled.tenant, name, past),
            most_tokens=None if most is None else most // HISTORY_SHARE,
        )
        turn = self.target.open_turn(filled, recall)
        is_usual = question.reuse is None and question.ratio is None
        return Asked(filled, called_s, turn, is_searched, is_usual)

    def _fill_in(self, question: Question) -> Question:
        settings = self.settings
        sampling = question.sampling or self.target.sampling.sampling()
        kb_order = None if self.kb is None else self.kb.settings.order
        return replace(
            question.fill_in(settings.usual, kb_order),
            sampling=tool_sampling(sampling, question.tool_use),
            tenant=question.tenant or settings.tenant,
            system=settings.system if question.system is None else question.system,
        )
