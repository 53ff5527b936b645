"""The prompt of a question over documents, in the three parts that reuse needs.

    preamble ‖ chunk ‖ chunk ‖ … ‖ question

The preamble (chat header, system prompt) is the same for every question; chunks come in any order
and company; the question closes with the header of the answer. Each part is tokenised by itself,
so a chunk has the same ids wherever it stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.errors import UnsupportedModel
from kvweave.tokenizer import Part, Tokenizer

LABEL = "Question: "
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
    asked: tuple[int, int]  # the part [start, end) of `question` that the user wrote

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
    preamble, closing = split_template(tokenizer, system)
    words = tokenizer.encode_text(f"{LABEL}{question.strip()}" if chunks else question.strip())
    label = len(tokenizer.encode_text(LABEL.rstrip())) if chunks else 0
    return Prompt(
        preamble=tuple(preamble),
        chunks=tuple(chunks),
        question=(*words, *closing),
        asked=(min(label, len(words) - 1), len(words)),
    )


def chunk_text(document: Document) -> str:
    """What stands in the prompt for a document: its title as a line of its own, then the text."""
    title = f"{document.title.strip()}\n" if document.title.strip() else ""
    return f"{title}{document.text.strip()}\n\n"


def split_template(tokenizer: Tokenizer, system: str) -> tuple[list[int], list[int]]:
    """What the chat template puts in front of and behind the user's words, as token ids.

    Users' words and the template's are tokenised apart: words can never become control tokens.
    """
    if not tokenizer.has_chat_template:
        before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        if system:
            before += tokenizer.encode_text(f"{system}\n\n")
        return before, tokenizer.encode("\nAnswer:")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "…"})
    parts = tokenizer.render_parts(messages)
    places = [i for i, part in enumerate(parts) if part.message == len(messages) - 1]
    if len(places) != 1:
        raise UnsupportedModel(
            f"the chat template shows the user's words {len(places)} times; kvweave wants one place"
        )

    def encode(some: Sequence[Part]) -> list[int]:
        ids: list[int] = []
        for part in some:
            own = part.message is None
            ids += tokenizer.encode(part.text) if own else tokenizer.encode_text(part.text)
        return ids

    return encode(parts[: places[0]]), encode(parts[places[0] + 1 :])
