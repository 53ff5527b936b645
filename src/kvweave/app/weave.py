"""The face of the composition root: documents in, answers out.

`Weave` is what the library, the command line and the server share. It may be used from many
threads: one engine computes for all of them. `opened.py` has what it is made of and how it ends.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from kvweave.app.answer.answering import Answer, AnswerStream, Piece, TokenLogprob
from kvweave.app.opened import Opened
from kvweave.app.question import AUTO, BOUND, REUSES, TOP_K, AskOptions, PlanOptions, Question
from kvweave.engine.sampling import Sampling
from kvweave.errors import RequestError
from kvweave.text.detokenizer import texts_of
from kvweave.text.prompt import Document, Prompt

if TYPE_CHECKING:
    from kvweave.ingest.pipeline import IngestOptions
    from kvweave.ingest.report import IngestReport, OnProgress
    from kvweave.ingest.sources import Source
    from kvweave.plan.plan import Plan

__all__ = [
    "AUTO",
    "BOUND",
    "REUSES",
    "TOP_K",
    "Answer",
    "AnswerStream",
    "Document",
    "Piece",
    "Sampling",
    "TokenLogprob",
    "Weave",
]


class Weave(Opened):
    """Answers questions with one loaded model, over given documents or a knowledge base."""

    def ingest(
        self,
        *sources: "Source",
        chunk_kv: bool = False,
        progress: "OnProgress | None" = None,
        options: "IngestOptions | None" = None,
        refresh_neighbours: bool = False,
        only_new: bool = False,
    ) -> "IngestReport":
        """Bring files, folders or (title, text) pairs in; do only what changed.

        `chunk_kv` also computes and stores the chunks' KV, so that `reuse="reuse"` finds it.
        `options` choose among files, set limits and prune. `refresh_neighbours` is for encoding
        "neighbours": chunks whose neighbours are others by now are computed again. `only_new`
        computes KV of the chunks that come, without a look at each of the others; the first time,
        and after an ingest without KV, all are looked at.
        """
        with self._ingesting:
            return self.library.ingest(
                sources,
                chunk_kv=chunk_kv,
                progress=progress,
                options=options,
                refresh_neighbours=refresh_neighbours,
                only_new=only_new,
            )

    def remove(self, reference: str) -> int:
        """Remove a document by id or file; returns how many chunks went with it, KV and all."""
        return self.library.remove(reference)

    def ask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Answer from `documents`, or from the `k` nearest chunks of the open knowledge base.

        `system` takes the place of the Weave's own system prompt for this question. `reuse` names a
        strategy: "full" prefills everything, "prefix" reuses what is exact, "reuse" takes stored
        chunk KV as it is, "weave" and others recompute a `ratio` of it (their own default if None):
        faster, and not exact. "auto" takes the cheapest way on this machine that calibration allows
        within `bound` (nats per token); `order="free"` lets it move chunks. Without `reuse`, a
        `ratio` means "weave"; without both it is "auto" where the knowledge base has KV of the
        chunks and this machine was measured before, else "full". `Answer.explain` says what was
        done, and `Answer.decision` why.

        `history` are the {"role", "content"} messages said before, the user's first. With a
        `conversation_id` the chunks of those turns stand in the history again, and those it holds
        are not sent twice; conversations of one `tenant` are unknown to others.
        """
        return self.stream(question, **options).finish()

    def stream(self, question: str, **options: Unpack[AskOptions]) -> AnswerStream:
        """As `ask`, piece by piece."""
        called_s = time.perf_counter()
        return self._replying.answer(Question(question, **options), called_s)

    def plan(self, question: str, **options: Unpack[PlanOptions]) -> "Plan":
        """What `ask` with reuse="auto" would do, and what else it would cost. Answers nothing."""
        return self._replying.plan(Question(question, **options))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, sampling: Sampling | None = None
    ) -> AnswerStream:
        """Continue a conversation of {"role", "content"} messages."""
        called_s = time.perf_counter()
        if not messages:
            raise RequestError("messages is empty; send at least one")
        return self._replying.plain(self._tokenizer.encode_chat(messages), sampling, called_s)

    def complete(
        self, prompt: str | Sequence[int], *, sampling: Sampling | None = None
    ) -> AnswerStream:
        """Continue a text or token ids, without a chat template."""
        called_s = time.perf_counter()
        ids = self._tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        return self._replying.plain(ids, sampling, called_s)

    def build_prompt(
        self,
        question: str,
        documents: Sequence[Document | str] = (),
        system: str | None = None,
    ) -> Prompt:
        """The prompt `ask` would use for these documents, by part."""
        return self._replying.prompting.build(question, documents, system)

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token adds; a character of several tokens comes with its last one."""
        return texts_of(self._tokenizer, token_ids)
