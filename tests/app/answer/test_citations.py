"""Numbers of sources behind the sentences that are theirs."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.app.answer.answer_stream import Answer, Piece
from kvweave.app.answer.wrapped_answers import CitedAnswer, Citer

ZORB = "Zorbs: a zorb is a small round tool. It is 14 cm wide."
LAMP = "Lamps: the lamp of the hall is 31 cm high and weighs 3.5 kg."
ANSWER = "A zorb is 14 cm wide. The lamp weighs 3.5 kg!\nNobody knows its colour or price."
CITED = "A zorb is 14 cm wide. [1] The lamp weighs 3.5 kg! [2]\nNobody knows its colour or price."


def cited(text: str, *sources: str) -> str:
    citer = Citer(sources)
    return citer.push(text) + citer.flush()


def test_a_sentence_has_the_number_of_the_source_that_has_its_words() -> None:
    assert cited(ANSWER, ZORB, LAMP) == CITED
    assert cited("A zorb is 14 cm wide", ZORB, LAMP) == "A zorb is 14 cm wide [1]"
    assert cited("A zorb is 14 cm wide.", LAMP, ZORB) == "A zorb is 14 cm wide. [2]"


@pytest.mark.parametrize("text", ["", "Yes.", "It is.", "Cats sleep all day. Zorb!", "\n\n"])
def test_what_no_source_has_stays_as_it_is(text: str) -> None:
    assert cited(text, ZORB, LAMP) == text
    assert cited(ANSWER) == ANSWER


@given(st.lists(st.integers(0, len(ANSWER)), max_size=12))
def test_however_a_text_is_cut_its_markers_are_the_same(cuts: list[int]) -> None:
    citer, places = Citer([ZORB, LAMP]), [0, *sorted(cuts), len(ANSWER)]
    pieces = [ANSWER[a:b] for a, b in pairwise(places)]
    assert "".join(map(citer.push, pieces)) + citer.flush() == CITED


class Told:
    """A stream of given pieces."""

    def __init__(self, *texts: str, is_cut: bool = False) -> None:
        self.answer: Answer | None = None
        self._texts = texts
        self._is_cut = is_cut
        self.is_closed = False

    def __iter__(self) -> Iterator[Piece]:
        yield from map(Piece, self._texts)
        if not self._is_cut:
            self.answer = Answer("".join(self._texts), "stop", 9, len(self._texts), 1.0, 2.0)

    def finish(self) -> Answer:
        raise AssertionError("nobody here asks for the whole of it at once")

    def take_whole(self) -> None: ...
    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None: ...
    def when_closed(self, call: Callable[[], None]) -> None: ...


def test_the_answer_is_what_its_pieces_were() -> None:
    inner = Told("A zorb is 14", " cm wide.", " Well", "!")
    stream = CitedAnswer(inner, [ZORB])
    pieces = [piece.text for piece in stream]
    assert pieces == ["A zorb is 14", " cm wide.", " [1] Well", "!"]
    assert stream.answer is not None
    assert stream.answer.text == "".join(pieces)
    assert stream.answer.prompt_tokens == 9
    stream.close()
    assert inner.is_closed


def test_an_answer_that_was_cut_is_none() -> None:
    stream = CitedAnswer(Told("A zorb is 14 cm wide.", is_cut=True), [ZORB])
    assert [piece.text for piece in stream] == ["A zorb is 14 cm wide."]
    assert stream.answer is None
