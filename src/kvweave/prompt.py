"""The prompt of a question over documents, in the three parts that reuse needs.

    preamble ‖ chunk ‖ chunk ‖ … ‖ question

The preamble (chat header, system prompt) is the same for every question; chunks come in any order
and company; the question closes with the header of the answer. Each part is tokenised by itself,
so a chunk has the same ids wherever it stands.
"""

from collections.abc import Mapping, Sequence
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


def lay_out_turns(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, str]],
    chunks: Sequence[tuple[int, ...]],
    system: str = SYSTEM,
) -> Prompt:
    """As `lay_out`, for a conversation: the chunks stand in front of its first user message.

    `messages` are user and assistant in turn, a user's first and last. The preamble is that of a
    single question, so stored chunk KV fits.
    """
    if len(messages) == 1:
        return lay_out(tokenizer, messages[0]["content"], chunks, system)
    given: list[Mapping[str, str]] = [{"role": "system", "content": system}] if system else []
    first, last = len(given), len(given) + len(messages) - 1
    parts = tokenizer.render_parts([*given, *messages])
    places = [part.message for part in parts]
    if places.count(first) != 1 or places.count(last) != 1:
        raise UnsupportedModel(
            "the chat template does not show each user message once; send one message at a time"
        )
    start = places.index(first)
    words = f"{LABEL if chunks else ''}{parts[start].text.strip()}"
    question, asked = tokenizer.encode_text(words), (0, 0)
    for part in parts[start + 1 :]:
        own = part.message is None
        ids = tokenizer.encode(part.text) if own else tokenizer.encode_text(part.text)
        if part.message == last:
            asked = (len(question), len(question) + len(ids))
        question += ids
    return Prompt(tuple(_encoded(tokenizer, parts[:start])), tuple(chunks), tuple(question), asked)


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

    return (
        _encoded(tokenizer, parts[: places[0]]),
        _encoded(tokenizer, parts[places[0] + 1 :]),
    )


def _encoded(tokenizer: Tokenizer, parts: Sequence[Part]) -> list[int]:
    """Parts as ids, with control tokens in the template's own words alone."""
    ids: list[int] = []
    for part in parts:
        own = part.message is None
        ids += tokenizer.encode(part.text) if own else tokenizer.encode_text(part.text)
    return ids
