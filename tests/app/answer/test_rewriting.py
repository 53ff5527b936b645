"""What the model is asked to make of a follow-up, and what is made of its reply."""

import pytest

from kvweave.app.answer.answerer import LONGEST_QUERY, read_rewritten, rewriting_messages

HISTORY = [
    {"role": "user", "content": "How wide is a zorb?"},
    {"role": "assistant", "content": "It is 14 cm wide."},
]


def test_the_model_sees_the_last_messages_and_the_question() -> None:
    long = [{"role": "user", "content": f"old {i} " + "x" * 5000} for i in range(9)]
    (message,) = rewriting_messages("And how heavy?", [*long, *HISTORY])
    assert "user: How wide is a zorb?\nassistant: It is 14 cm wide." in message["content"]
    assert "Last question: And how heavy?" in message["content"]
    assert "old 4" not in message["content"]
    assert len(message["content"]) < 6000


@pytest.mark.parametrize(
    ("reply", "query"),
    [
        ("How heavy is a zorb?", "How heavy is a zorb?"),
        ('\n Question: "How heavy is a zorb?"\n\nBecause', "How heavy is a zorb?"),
        ("", None),
        (" \n ", None),
        ("x" * (LONGEST_QUERY + 1), None),
    ],
)
def test_the_first_line_is_the_query(reply: str, query: str | None) -> None:
    assert read_rewritten(reply) == query
