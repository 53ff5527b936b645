"""Answers against gold answers."""

import pytest

from kvweave.calibrate.answer_scores import exact_match, token_f1


def test_scores_forgive_case_punctuation_and_articles() -> None:
    assert exact_match("The Moon.", ["sun", "moon"]) == 1.0
    assert token_f1("the pale moon", ["moon"]) == pytest.approx(2 / 3)
    assert token_f1("sun", ["moon"]) == 0.0
