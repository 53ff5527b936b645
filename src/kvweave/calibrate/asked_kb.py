"""The knowledge base that calibration asks its questions of.

Users who have no questions at hand get some made from its own text. No model and no network: a
chunk is drawn, and asked about in the words of its heading and of one of its sentences. Such
questions name what they ask for, so they find their chunk more surely than a person's do; they say
what fusion costs on these documents, not how well they are searched.
"""

import random
import re
from collections.abc import Callable, Iterable, Sequence

from kvweave.calibrate.case import Case
from kvweave.calibrate.encodings import Nearest
from kvweave.calibrate.questions import QuestionRecord, case_of_chunks
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import CorpusError
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk

BATCH = 500  # chunks read at a time
MIN_WORDS = 6  # of a sentence that is worth asking about
MAX_WORDS = 14  # of it in the question
# Asked in turn: short facts, several facts, a summary. The last wants more than one sentence.
FORMS = (
    "What is said about {topic} here: {words}?",
    "{words}: why is that, and what else is known about {topic}?",
    "Sum up what the passages say about {topic}.",
    "How does this relate to {topic}: {words}?",
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


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


def make_questions(chunks: Iterable[Chunk], count: int, seed: int = 0) -> list[QuestionRecord]:
    """At most `count` questions about chunks drawn from all of them; the same seed gives the same.

    Chunks without a sentence are passed over.
    """
    rng = random.Random(seed)  # noqa: S311 a sample, no secret
    made: list[QuestionRecord] = []
    every = list(chunks)
    for chunk in rng.sample(every, len(every)):
        if len(made) == count:
            break
        body = chunk.text.removeprefix(chunk.title).strip()
        sentences = [s.split() for s in _SENTENCE.split(" ".join(body.split()))]
        long_enough = [words for words in sentences if len(words) >= MIN_WORDS]
        if not long_enough:
            continue
        said = rng.choice(long_enough)[:MAX_WORDS]
        topic = chunk.title.rpartition("›")[2].strip() or " ".join(said[:4])
        words = " ".join(said).rstrip(".!?,;:")
        form = FORMS[len(made) % len(FORMS)]
        made.append(QuestionRecord(form.format(topic=topic, words=words)))
    return made
