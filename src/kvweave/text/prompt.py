"""The prompt of a question over documents, in the parts that reuse needs.

    preamble ‖ history ‖ chunk ‖ chunk ‖ … ‖ question

The preamble (chat header, system prompt) is the same for every question; the history is what was
said before in a conversation; chunks come in any order and company; the question closes with the
header of the answer. Each part is tokenised by itself, so a chunk has the same ids wherever it
stands, in the history too: an earlier turn has the ids there that its own prompt had.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvweave.errors import PromptTooLong, RequestError, UnsupportedModel
from kvweave.text.tokenizer import TemplatePart, Tokenizer
from kvweave.text.tool_calls import (
    FORCED_OPEN,
    Message,
    ToolUse,
    has_tool_parts,
    template_messages,
)

LABEL = "Question: "
BLOCK_TOKENS = 256  # a longer message, or a plain prompt, is parts of so many
SURE_CHARS = 8  # per token of the context: texts up to there are just tokenised, it costs little
MOST_CHARS = 32  # per token of the context: no text that people write has so many
PIECE_CHARS = 16 << 10  # counted at a time
SEAM_TOKENS = 16  # by which a cut between two pieces may change their count
MOST_FRAMES = 32  # of a tokenizer, by system prompt
SYSTEM = "You answer questions from the passages you are given. Be brief and exact."


@dataclass(frozen=True, slots=True)
class Document:
    """A text to answer from, brought by the caller; its title becomes the first line."""

    text: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids by part. The prompt is their concatenation."""

    preamble: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    asked: tuple[int, int]  # the part [start, end) of `question` that the user wrote
    history: tuple[tuple[int, ...], ...] = ()  # between preamble and chunks: chunks, and words
    turns: int = 0  # before this one whose chunks the history holds
    left_out: tuple[tuple[int, ...], ...] = ()  # chunks that were found and stand in the history
    tenant: str = ""  # its exact KV is shared within a tenant
    as_of: int | None = None  # when its chunks were found, on the engine's clock of deletions

    @property
    def token_ids(self) -> list[int]:
        parts = (self.preamble, *self.history, *self.chunks, self.question)
        return list(chain.from_iterable(parts))


@dataclass(frozen=True, slots=True)
class PastMessage:
    """One message of a conversation, with the chunks that stood in front of the user's words."""

    role: str  # "user", "assistant" or "tool"
    content: str
    chunks: tuple[tuple[int, ...], ...] = ()
    calls: tuple[Message, ...] = ()  # of an assistant, as a chat template wants them

    def as_message(self) -> dict[str, Any]:
        """The message in the form a chat template wants, without the chunks."""
        said: dict[str, Any] = {"role": self.role, "content": self.content}
        return {**said, "tool_calls": list(self.calls)} if self.calls else said

    @property
    def is_silent(self) -> bool:
        """An assistant that only called: it said no words."""
        return bool(self.calls) and not self.content


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
    history: Sequence[PastMessage] = (),
    use: ToolUse | None = None,
    since: Sequence[Message] = (),
) -> Prompt:
    """Lay out chunks that have their token ids already, and a question, behind a history. The
    preamble shows the tools of `use`; `since` are calls and their results behind the question."""
    tools = _tools(tokenizer, use, history, since)
    preamble, closing = split_template(tokenizer, system, tools, since)
    if use is not None and use.is_forced:
        closing = [*closing, *tokenizer.encode(FORCED_OPEN)]
    words = _words(tokenizer, question, bool(chunks))
    label = len(tokenizer.encode_text(LABEL.rstrip())) if chunks else 0
    return Prompt(
        preamble=tuple(preamble),
        chunks=tuple(chunks),
        question=(*words, *closing),
        asked=(min(label, len(words) - 1), len(words)),
        history=tuple(_history(tokenizer, system, history, tools)) if history else (),
        turns=sum(bool(message.chunks) for message in history),
    )


def chat_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], use: ToolUse | None = None
) -> Prompt:
    """A conversation by message, each with the template's words in front of it. A later turn begins
    with the same parts, so their exact KV is found again; so do others that have the same tools."""
    said = template_messages(messages)
    if use is not None or has_tool_parts(said):
        tokenizer.check_tools()
    parts: list[tuple[int, ...]] = []
    header: list[int] = []
    num_system = next((i for i, m in enumerate(said) if m.get("role") != "system"), len(said))
    for part in tokenizer.render_parts(said, () if use is None else use.tools):
        if part.message is None:
            header += tokenizer.encode_part(part)
            continue
        if use is not None and part.message == num_system:
            parts += _blocks(header)  # the tools: they come back whatever is asked
            header = []
        parts += _blocks([*header, *tokenizer.encode_text(part.text)])
        header = []
    if use is not None and use.is_forced:
        header += tokenizer.encode(FORCED_OPEN)
    return _of_parts(parts, tuple(header))


def plain_prompt(token_ids: Sequence[int]) -> Prompt:
    """A prompt without parts of its own, cut where every prompt that begins like it is cut."""
    return _of_parts(_blocks(token_ids), ())


def spanned_prompt(
    token_ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    num_preamble: int | None = None,
    asked: tuple[int, int] | None = None,
) -> Prompt:
    """A prompt whose chunks stand in `spans`, half-open and in order; `asked` is what the user
    wrote. What stands between two chunks, or between preamble and chunks, is history, and so is
    every chunk in front of it."""
    if not spans:
        return plain_prompt(token_ids)
    first, last = spans[0][0], spans[-1][1]
    front = first if num_preamble is None else num_preamble
    if not 1 <= front <= first or last >= len(token_ids):
        raise RequestError(
            f"chunks stand in [{first}, {last}) of {len(token_ids)} tokens; a prompt has a "
            "preamble in front of them and a question behind them"
        )
    parts: list[tuple[int, ...]] = []
    num_history, turns, at = 0, 0, front
    for start, end in spans:
        if start > at:
            parts.append(tuple(token_ids[at:start]))
            num_history, turns = len(parts), turns + 1
        parts.append(tuple(token_ids[start:end]))
        at = end
    start, end = asked or (last, len(token_ids))
    if not last <= start < end <= len(token_ids):
        raise RequestError(f"the question [{start}, {end}) does not stand behind the last chunk")
    return Prompt(
        preamble=tuple(token_ids[:front]),
        chunks=tuple(parts[num_history:]),
        question=tuple(token_ids[last:]),
        asked=(start - last, end - last),
        history=tuple(parts[:num_history]),
        turns=turns,
    )


def _of_parts(parts: list[tuple[int, ...]], closing: tuple[int, ...]) -> Prompt:
    """Make a prompt of parts; the last of them is what is always computed."""
    if not closing and parts:
        closing = parts.pop()
    return Prompt((), (), closing, (0, len(closing)), history=tuple(parts))


def _blocks(ids: Sequence[int]) -> list[tuple[int, ...]]:
    starts = range(0, len(ids), BLOCK_TOKENS)
    return [tuple(ids[start : start + BLOCK_TOKENS]) for start in starts]


def past_messages(messages: Sequence[Message]) -> list[PastMessage]:
    """The history that a request brought, checked. Raises RequestError."""
    past: list[PastMessage] = []
    for message in template_messages(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "tool") or not isinstance(content, str):
            raise RequestError(
                "history holds user, assistant and tool messages whose content is text"
            )
        past.append(PastMessage(role, content, calls=tuple(message.get("tool_calls", ()))))
    if past and past[0].role != "user":
        raise RequestError("history begins with a user's message")
    return past


def _tools(
    tokenizer: Tokenizer,
    use: ToolUse | None,
    history: Sequence[PastMessage],
    since: Sequence[Message],
) -> Sequence[Message]:
    """What the preamble shows. Raises RequestError where the model knows no tools."""
    if use is not None or since or any(m.calls or m.role == "tool" for m in history):
        tokenizer.check_tools()
    return () if use is None else use.tools


def _words(tokenizer: Tokenizer, question: str, has_chunks: bool) -> list[int]:
    """Ids of a question: labelled where chunks stand in front of it, else as it is."""
    text = question.strip()
    return tokenizer.encode_text(f"{LABEL}{text}" if has_chunks else text)


def _history(
    tokenizer: Tokenizer, system: str, past: Sequence[PastMessage], tools: Sequence[Message]
) -> list[tuple[int, ...]]:
    """Earlier turns up to the header of the next question: each chunk a part of its own, and what
    was said between them."""
    parts: list[tuple[int, ...]] = []
    said: list[int] = []
    for part, message in _render_history(tokenizer, system, past, tools):
        if message is None:
            said += tokenizer.encode_part(part)
            continue
        if message.chunks:
            if said:
                parts.append(tuple(said))
            parts += message.chunks
            said = []
        is_user = message.role == "user"
        words = _words(tokenizer, message.content, bool(message.chunks))
        said += words if is_user else tokenizer.encode_text(message.content)
    if said:
        parts.append(tuple(said))
    return parts


def _render_history(
    tokenizer: Tokenizer, system: str, past: Sequence[PastMessage], tools: Sequence[Message]
) -> list[tuple[TemplatePart, PastMessage | None]]:
    """Render the history behind the preamble: the template's words (None) and the messages'."""
    if not tokenizer.has_chat_template:
        return _render_plainly(past)
    header: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    question = {"role": "user", "content": "…"}
    messages = [*header, *(message.as_message() for message in past), question]
    first, last = len(header), len(messages) - 1
    parts = tokenizer.render_parts(messages, tools)
    shown = {part.message: i for i, part in enumerate(parts) if part.message is not None}
    places = [part.message for part in parts if part.message is not None and part.message >= first]
    said = [first + place for place, message in enumerate(past) if not message.is_silent]
    if places != [*said, last]:
        raise UnsupportedModel(
            "the chat template does not show every message of the history once and in order"
        )
    start, end = shown[first], shown[last]
    alone = tokenizer.render_parts([*header, question], tools)
    if [part.text for part in parts[:start]] != [part.text for part in alone[:start]]:
        raise UnsupportedModel("the chat template changes the preamble when a history follows it")
    return [
        (part, None if part.message is None else past[part.message - first])
        for part in parts[start:end]
    ]


def _render_plainly(past: Sequence[PastMessage]) -> list[tuple[TemplatePart, PastMessage | None]]:
    """Render the history for a model without a chat template."""
    parts: list[tuple[TemplatePart, PastMessage | None]] = []
    for place, message in enumerate(past):
        behind = "\nAnswer:" if message.role == "user" else "\n\n"
        parts.append((TemplatePart(message.content, place), message))
        parts.append((TemplatePart(behind, None), None))
    return parts


def chunk_text(document: Document) -> str:
    """What stands in the prompt for a document: its title as a line of its own, then the text."""
    title = f"{document.title.strip()}\n" if document.title.strip() else ""
    return f"{title}{document.text.strip()}\n\n"


def split_template(
    tokenizer: Tokenizer,
    system: str,
    tools: Sequence[Message] = (),
    since: Sequence[Message] = (),
) -> tuple[list[int], list[int]]:
    """What the chat template puts in front of and behind the user's words, as token ids; behind
    them stands what was called since, with its results.

    Users' words and the template's are tokenised apart: words can never become control tokens.
    """
    if tools or since:
        return _split_template(tokenizer, system, tools, since)
    frame = tokenizer.frames.get(system)
    if frame is None:  # the same for every question that uses no tools: rendering takes a while
        if len(tokenizer.frames) >= MOST_FRAMES:
            tokenizer.frames.clear()
        frame = tokenizer.frames[system] = _split_template(tokenizer, system, (), ())
    before, behind = frame
    return list(before), list(behind)


def _split_template(
    tokenizer: Tokenizer, system: str, tools: Sequence[Message], since: Sequence[Message]
) -> tuple[list[int], list[int]]:
    if not tokenizer.has_chat_template:
        before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        if system:
            before += tokenizer.encode_text(f"{system}\n\n")
        return before, tokenizer.encode("\nAnswer:")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    asked = len(messages)
    messages.append({"role": "user", "content": "…"})
    messages += template_messages(since)
    parts = tokenizer.render_parts(messages, tools)
    places = [i for i, part in enumerate(parts) if part.message == asked]
    if len(places) != 1:
        raise UnsupportedModel(
            f"the chat template shows the user's words {len(places)} times; kvweave wants one place"
        )
    at = places[0]
    return tokenizer.encode_parts(parts[:at]), tokenizer.encode_parts(parts[at + 1 :])


def refuse_long(tokenizer: Tokenizer, texts: Sequence[str], max_context: int) -> None:
    """Raise PromptTooLong for texts that certainly have more tokens than the context holds. Others
    may still turn out too long once they are tokenised.

    Tokenising takes about a second and 200 MB per megabyte, which a text that no context could hold
    must not cost: its characters decide, or, where those leave it open, the tokens of its pieces,
    of which one is in memory at a time and no more are counted than the context holds.
    """
    if len(texts) > max_context:  # the template's words alone are a token for each
        raise _too_long(f"{len(texts):,} parts", max_context)
    num_chars = sum(map(len, texts))
    if num_chars <= SURE_CHARS * max_context:
        return
    if num_chars > MOST_CHARS * max_context:
        raise _too_long(f"{num_chars:,} characters", max_context)
    least = 0
    for text in texts:
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            least += max(0, len(tokenizer.encode_text(piece)) - SEAM_TOKENS)
            if least >= max_context:
                raise _too_long(f"more than {least:,} tokens", max_context)


def _too_long(what: str, max_context: int) -> PromptTooLong:
    return PromptTooLong(
        f"the prompt has {what}, the model's context holds {max_context} tokens with the answer; "
        "send less text or fewer documents"
    )
