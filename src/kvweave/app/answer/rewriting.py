"""Follow-ups that a search can understand: the model itself says what is asked.

"And how heavy?" finds nothing; "How heavy is a zorb?" does. The prompt of the answer keeps the
question as it was asked.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvweave.engine.sampling import Sampling

MOST_MESSAGES = 6  # of the history, the last ones
MOST_CHARS = 1000  # of one message
LONGEST_QUERY = 400  # characters: what is longer is no question
SAMPLING = Sampling(max_tokens=64, stop=("\n\n",))  # the likeliest words
ASKED = (
    "Below is a conversation and its last question. Write that question so that it can be "
    "understood without the conversation: put the names of things in place of words like it, that "
    "or they. Write the question alone and do not answer it."
)


def rewriting_messages(question: str, history: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What the model is asked, as messages of a chat."""
    said = [
        f"{message.get('role')}: {_short(str(message.get('content')))}"
        for message in history[-MOST_MESSAGES:]
        if message.get("content")  # calls of tools are no words
    ]
    content = "\n".join(
        [ASKED, "", "Conversation:", *said, "", f"Last question: {_short(question)}", "Question:"]
    )
    return [{"role": "user", "content": content}]


def read_rewritten(text: str) -> str | None:
    """The query in a model's reply; None: it gave none."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    query = lines[0].removeprefix("Question:").strip().strip('"') if lines else ""
    return query if 0 < len(query) <= LONGEST_QUERY else None


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]} …"
