"""The knowledge base that calibration asks its questions of."""

from collections.abc import Callable, Sequence

from kvweave.calibrate.case import Case
from kvweave.calibrate.encodings import Nearest
from kvweave.calibrate.made_questions import make_questions
from kvweave.calibrate.questions import QuestionRecord, case_of_chunks
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import CorpusError
from kvweave.text.tokenizer import Tokenizer

BATCH = 500  # chunks read at a time


class AskedKB:
    """What is retrieved for a question, and what stands in front of a chunk behind neighbours.

    The knowledge base must stay open while it is measured: neighbours are looked up question by
    question.
    """

    def __init__(
        self, kb: KnowledgeBase, tokenizer: Tokenizer, nearest: Callable[[int], Nearest]
    ) -> None:
        """`nearest` looks up so many neighbours of chunks, as chunk KV of `kb` is made."""
        self._kb = kb
        self._tokenizer = tokenizer
        self.nearest = nearest

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk at most."""
        return self._kb.settings.chunk_tokens

    def made_questions(self, count: int) -> list[QuestionRecord]:
        """Questions out of its own text. Raises CorpusError if it has none to ask about."""
        chunks = (chunk for batch in self._kb.catalogue.all_chunks(BATCH) for chunk in batch)
        made = make_questions(chunks, count)
        if not made:
            raise CorpusError(
                f"{self._kb.folder} has no sentence to ask about; bring documents in with "
                "`kvweave ingest`, or give --questions FILE"
            )
        return made

    def cases(self, records: Sequence[QuestionRecord], k: int) -> list[Case]:
        """Each question over its `k` best chunks; one that finds a single chunk is left out. Raises
        CorpusError if none finds more."""
        found = []
        for record in records:
            chunks = [hit.chunk.token_ids for hit in self._kb.search(record.question, k)]
            if len(chunks) > 1:
                found.append(case_of_chunks(self._tokenizer, record, chunks))
        if not found:
            raise CorpusError(
                f"no question finds more than one chunk in {self._kb.folder}, and the first is "
                "always exact: nothing to measure; bring more documents in with `kvweave ingest`"
            )
        return found
