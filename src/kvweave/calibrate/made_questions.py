"""Questions made from a knowledge base's own text, for users who have none at hand.

No model and no network: a chunk is drawn, and asked about in the words of its heading and of one of
its sentences. Such questions name what they ask for, so they find their chunk more surely than a
person's do; they say what fusion costs on these documents, not how well they are searched.
"""

import random
import re
from collections.abc import Iterable

from kvweave.calibrate.questions import QuestionRecord
from kvweave.types import Chunk

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
