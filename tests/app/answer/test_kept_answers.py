"""What is kept of answers, beyond what a server shows (tests/serve/routes/test_answers.py)."""

import torch

from kvweave.app.answer.answer_stream import Answer, WatchedTokens
from kvweave.app.answer.kept_answers import KeptAnswer, KeptAnswers
from kvweave.app.answer.notes import AnswerTrace
from kvweave.text.prompt import plain_prompt


def test_what_a_comparison_watched_is_not_kept() -> None:
    """A float per word and token: 64 answers of each tenant would be gigabytes."""
    watched = WatchedTokens((1,), (torch.zeros(151_936),))
    trace = AnswerTrace("Why?", plain_prompt((1, 2, 3)), 0.0, 0.1, 0.2, None, ())
    answer = Answer("So.", "stop", 3, 1, 100.0, 200.0, watched=watched, trace=trace)
    kept = KeptAnswers(4, lambda model, chunk, as_of, tenant: False)
    kept.add("acme", KeptAnswer("one", "tiny", None, answer))
    found = kept.get("acme", "one").answer
    assert found.watched is None
    assert (found.text, found.trace) == ("So.", trace)
    assert answer.watched is watched, "who compares still has it"
