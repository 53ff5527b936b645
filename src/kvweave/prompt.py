"""The prompt of a question over documents, in the three parts that reuse needs.

    preamble ‖ chunk ‖ chunk ‖ … ‖ question

The preamble (chat header, system prompt) is the same for every question; chunks come in any order
and company; the question closes with the header of the answer. Each part is tokenised by itself,
so a chunk has the same ids wherever it stands.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.tokenizer import Tokenizer

SYSTEM = "You answer questions from the passages you are given. Be brief and exact."


@dataclass(frozen=True, slots=True)
class Document:
    """A text to answer from."""

    text: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids by part. The prompt is their concatenation."""

    preamble: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        return [*self.preamble, *(i for chunk in self.chunks for i in chunk), *self.question]


def build_prompt(
    tokenizer: Tokenizer, question: str, documents: Sequence[Document], system: str = SYSTEM
) -> Prompt:
    """Lay out `question` behind `documents` in the model's own chat format."""
    chunks = [tuple(tokenizer.encode_text(chunk_text(d))) for d in documents]
    return lay_out(tokenizer, question, chunks, system)


def lay_out(
    tokenizer: Tokenizer,
    question: str,
    chunks: Sequence[tuple[int, ...]],
    system: str = SYSTEM,
) -> Prompt:
    """As `build_prompt`, for chunks that have their token ids already."""
    before, after = split_template(tokenizer, system)
    asked = f"Question: {question.strip()}" if chunks else question.strip()
    # Users' words and the template's are tokenised apart: words can never become control tokens.
    return Prompt(
        preamble=tuple(tokenizer.encode(before)),
        chunks=tuple(chunks),
        question=(*tokenizer.encode_text(asked), *tokenizer.encode(after)),
    )


def chunk_text(document: Document) -> str:
    """What stands in the prompt for a document: its title as a line of its own, then the text."""
    title = f"{document.title.strip()}\n" if document.title.strip() else ""
    return f"{title}{document.text.strip()}\n\n"


def split_template(tokenizer: Tokenizer, system: str) -> tuple[str, str]:
    """What the chat template puts in front of and behind the user's words.

    A random word stands in for the user's words and is cut out again. It is drawn anew each time,
    so no text a user can write plays a part in where the cut falls.
    """
    if not tokenizer.has_chat_template:
        return (f"{system}\n\n" if system else "", "\nAnswer:")
    mark = secrets.token_hex(16)
    messages = [{"role": "system", "content": system}] if system else []
    rendered = tokenizer.render_chat([*messages, {"role": "user", "content": mark}])
    before, _, after = rendered.partition(mark)
    return before, after
