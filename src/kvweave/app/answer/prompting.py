"""From a question to its prompt: which chunks, behind which history, in which words.

Part of the composition root: only `replying.py` uses it. Any thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvweave.app.answer.conversations import Conversations, ConversationScope, IsGone, Talk
from kvweave.app.question import Question, refuse_empty
from kvweave.text.prompt import Document, Prompt, build_prompt, chunk_text, lay_out, past_messages
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Hit

Find = Callable[[str, int], list[Hit]]  # the chunks nearest to a question, and how many


class PromptMaker:
    """Lays prompts out for one model and, where one is open, its knowledge base."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        system: str,
        tenant: str = "",
        find: Find | None = None,
        conversations: Conversations | ConversationScope | None = None,
        *,
        is_gone: IsGone,
    ) -> None:
        """`find` searches the knowledge base; None: there is none. `conversations` where they are
        remembered elsewhere. `is_gone`: whether a chunk that was found then was deleted since."""
        self._tokenizer = tokenizer
        self._system = system
        self._tenant = tenant
        self._find = find
        given = conversations  # an empty one is one
        self._conversations = Conversations() if given is None else given
        self._is_gone = is_gone

    def talk(self, ask: Question) -> Talk:
        """What was said before, with the chunks that stood there."""
        past = past_messages(ask.history)
        tenant, name = self._tenant_of(ask), ask.conversation_id
        return self._conversations.talk(tenant, name, past, self._is_gone)

    def prompt(self, ask: Question) -> Prompt:
        """The prompt of a question over its documents, or over what a search finds."""
        if ask.documents is None and self._find is not None:
            chunks = [hit.chunk.token_ids for hit in self._find(ask.question, ask.k)]
        else:
            chunks = self.given(ask)
        return self.over(chunks, ask, self.talk(ask))

    def given(self, ask: Question) -> list[tuple[int, ...]]:
        """The documents of a request as chunks."""
        texts = _documents(ask.documents or ())
        return [tuple(self._tokenizer.encode_text(chunk_text(text))) for text in texts]

    def over(self, chunks: Sequence[tuple[int, ...]], ask: Question, talk: Talk) -> Prompt:
        """The question behind its history and the chunks that the history does not hold."""
        held = talk.held(chunks)
        new = [ids for ids in chunks if ids not in held]
        system = self._words(ask.system)
        prompt = lay_out(self._tokenizer, ask.question, new, system, talk.messages)
        return replace(prompt, left_out=tuple(held), tenant=self._tenant_of(ask))

    def build(
        self, question: str, documents: Sequence[Document | str], system: str | None
    ) -> Prompt:
        """The prompt of a question over documents, without a history."""
        refuse_empty(question)
        return build_prompt(self._tokenizer, question, _documents(documents), self._words(system))

    def _words(self, system: str | None) -> str:
        return self._system if system is None else system

    def _tenant_of(self, ask: Question) -> str:
        return ask.tenant or self._tenant


def _documents(documents: Sequence[Document | str]) -> list[Document]:
    return [Document(d) if isinstance(d, str) else d for d in documents]
