"""Questions out of a knowledge base's own text."""

from kvweave.calibrate.asked_kb import make_questions
from kvweave.corpus.chunker import make_chunk_id
from kvweave.types import Chunk


def chunk(title: str, body: str) -> Chunk:
    ids = tuple(body.encode())
    text = f"{title}\n{body}\n\n"
    return Chunk(make_chunk_id(ids), title, text, ids)


CHUNKS = [
    chunk(f"Guide › Part {i}", f"Part {i} tells how a node is drained before it is restarted. Yes.")
    for i in range(9)
]


def test_questions_use_the_words_of_their_chunk() -> None:
    (made,) = make_questions(CHUNKS[:1], 5)
    assert "Part 0" in made.question
    assert "Guide" not in made.question, "the last heading is what the chunk is about"
    assert "how a node is drained before it is restarted" in made.question
    assert (made.answers, made.passages) == ((), ())


def test_the_same_seed_draws_the_same_chunks_and_no_chunk_twice() -> None:
    made = make_questions(CHUNKS, 6)
    assert made == make_questions(CHUNKS, 6)
    assert len({record.question for record in made}) == 6
    assert made != make_questions(CHUNKS, 6, seed=1)


def test_what_has_no_sentence_is_not_asked_about() -> None:
    assert make_questions([chunk("Table", "1 2 3"), chunk("", "No. Yes. Perhaps.")], 5) == []
