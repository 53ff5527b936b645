"""The packaged valley: passages of a chunk each, and questions that they answer."""

import re
from pathlib import Path

import pytest

from kvweave.demo import PASSAGES, SHOWN, DemoQuestion, read_questions
from kvweave.model.files.locate import locate
from kvweave.text.tokenizer import Tokenizer

FILES = sorted(PASSAGES.glob("*.md"))
QUESTIONS = read_questions()


def words(text: str) -> str:
    return " ".join(text.split())


def test_there_are_a_few_dozen_passages_and_half_of_the_questions_need_two() -> None:
    assert 36 <= len(FILES) <= 48
    assert len(QUESTIONS) == 40
    assert sum(len(question.passages) == 2 for question in QUESTIONS) == 20
    assert len({question.question for question in QUESTIONS}) == 40
    assert [len(QUESTIONS[i].passages) for i in SHOWN] == [1, 2, 2]


def test_every_passage_is_one_chunk_of_like_length() -> None:
    tokenizer = Tokenizer(Path(locate("smollm2")))
    for file in FILES:
        assert 80 <= len(tokenizer.encode_text(file.read_text())) <= 200, file.name
        assert file.read_text().startswith("# ")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.question[:40])
def test_an_answer_stands_in_the_last_passage_and_not_in_the_question(
    question: DemoQuestion,
) -> None:
    *before, last = [words((PASSAGES / f"{stem}.md").read_text()) for stem in question.passages]
    assert question.is_answered_by(last)
    assert not question.is_answered_by(question.question)
    for text in before:
        assert not question.is_answered_by(text), "the first passage alone would do"
    assert all(1 <= len(re.findall(r"\w+", answer)) <= 3 for answer in question.answers)


def test_an_answer_is_found_as_words_whatever_their_case() -> None:
    six = DemoQuestion("How long?", ("six", "6"), ())
    assert six.is_answered_by("SIX days.")
    assert six.is_answered_by("(6)")
    assert not six.is_answered_by("sixty days, 1706 of them")
    high = DemoQuestion("How high?", ("2,316",), ())
    assert high.is_answered_by("It is 2316 m high.")
    assert high.is_answered_by("2,316 metres")
    assert not high.is_answered_by("12,316 metres")
