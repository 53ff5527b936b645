"""Prompts for upstreams, in the layout that reuse needs.

    TokenPrompts   token ids, with the spans of the chunks; the model's tokenizer is here
    TextPrompts    messages; the upstream tokenises, and its own prefix cache is all there is

Both lay a prompt out alike: preamble ‖ history ‖ chunks ‖ question, each chunk the same wherever it
stands.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from kvweave.corpus.chunker import make_chunk_id
from kvweave.gateway.fleet import RoutedPrompt
from kvweave.gateway.mirror import PromptPart
from kvweave.text.prompt import LABEL, PastMessage, Prompt, lay_out
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import ChunkId

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHARS_PER_TOKEN = 4  # of a text whose tokenizer is not here: a guess for routing alone

BLOCK = 256  # tokens of a plain text that are routed by together, or characters
CALLING = ("tool_calls", "tool_call_id")  # fields of messages about calls

ChunkIds = tuple[int, ...]
TextOf = Callable[[ChunkIds], str]  # of a chunk by its token ids


@dataclass(frozen=True, slots=True)
class UpstreamPrompt:
    """A prompt as it is sent."""

    path: str  # CHAT or COMPLETIONS
    content: Mapping[str, Any]  # `messages` or `prompt`
    routed: RoutedPrompt
    num_tokens: int  # a guess where the tokenizer is not here; the upstream counts
    chunks: tuple[ChunkIds, ...] = ()  # in front of the question, in this order
    spans: tuple[tuple[int, int], ...] = ()  # half-open, of all chunks, the history's too
    preamble: int = 0  # tokens of it
    asked: tuple[int, int] | None = None  # what the user wrote

    @property
    def front(self) -> RoutedPrompt:
        """What stands in front of the chunks: all but them and the question."""
        parts = self.routed.parts[: -len(self.chunks) - 1]
        return self.routed._replace(parts=parts)

    @property
    def places(self) -> dict[ChunkId, tuple[int, int]]:
        """Where each chunk stands, the history's too; empty where the upstream tokenises."""
        if self.path == CHAT:
            return {}
        ends = accumulate(part.num_tokens for part in self.routed.parts)
        return {
            ChunkId(part.key.decode()): (end - part.num_tokens, end)
            for part, end in zip(self.routed.parts, ends, strict=True)
            if part.is_chunk
        }


class UpstreamWords(NamedTuple):
    """What a prompt is made of."""

    question: str
    chunks: tuple[ChunkIds, ...]
    system: str
    history: Sequence[PastMessage] = ()
    salt: bytes = b""  # of the tenant
    model: str = ""  # that shall answer; "": whichever


class PromptMaker(Protocol):
    """Makes prompts. Any thread."""

    needs_texts: bool  # `text_of` is called

    def make(self, words: UpstreamWords, text_of: TextOf) -> UpstreamPrompt: ...


class TokenPrompts:
    """With the model's own tokenizer."""

    needs_texts = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def make(self, words: UpstreamWords, text_of: TextOf) -> UpstreamPrompt:
        prompt = lay_out(self._tokenizer, words.question, words.chunks, words.system, words.history)
        said = {chunk for message in words.history for chunk in message.chunks}
        parts, spans = _parts(prompt, said)
        token_ids = prompt.token_ids
        start = len(token_ids) - len(prompt.question)
        return UpstreamPrompt(
            COMPLETIONS,
            {"prompt": token_ids},
            RoutedPrompt(tuple(parts), words.salt, words.model),
            len(token_ids),
            words.chunks,
            tuple(spans),
            len(prompt.preamble),
            (start + prompt.asked[0], start + prompt.asked[1]),
        )


class TextPrompts:
    """Without one: what the chat template of the upstream makes of the same words."""

    needs_texts = True

    def make(self, words: UpstreamWords, text_of: TextOf) -> UpstreamPrompt:
        messages: list[dict[str, str]] = []
        parts: list[PromptPart] = []

        def say(role: str, content: str, chunks: Sequence[ChunkIds] = ()) -> None:
            """Chunks, each as it stands in every prompt, and the words behind them."""
            words = f"{LABEL}{content.strip()}" if chunks else content
            messages.append({"role": role, "content": "".join([*map(text_of, chunks), words])})
            parts.extend(_chunk_part(chunk) for chunk in chunks)
            parts.append(text_part(f"{role}\0{words}"))

        if words.system:
            say("system", words.system)
        for message in words.history:
            say(message.role, message.content, message.chunks)
        say("user", words.question, words.chunks)
        routed = RoutedPrompt(tuple(parts), words.salt, words.model)
        content = {"messages": messages}
        return UpstreamPrompt(CHAT, content, routed, routed.num_tokens, words.chunks)


def chat_messages(
    messages: Sequence[Mapping[str, Any]],
    salt: bytes,
    model: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
) -> UpstreamPrompt:
    """A conversation without chunks, as the client sent it. `tools` stand in front of it."""
    sent: list[dict[str, Any]] = []
    parts = [text_part(json.dumps(tools))] if tools else []
    for message in messages:
        calls = {name: message[name] for name in CALLING if message.get(name)}
        content = str(message.get("content") or "")
        sent.append({"role": str(message["role"]), "content": content, **calls})
        said = json.dumps(calls, default=str) if calls else ""
        parts.append(text_part(f"{message['role']}\0{content}{said}"))
    routed = RoutedPrompt(tuple(parts), salt, model)
    return UpstreamPrompt(CHAT, {"messages": sent}, routed, routed.num_tokens)


def plain_text(prompt: str | Sequence[int], salt: bytes, model: str = "") -> UpstreamPrompt:
    """A text or token ids to be continued, in blocks of so many tokens or characters."""
    blocks = [prompt[at : at + BLOCK] for at in range(0, len(prompt), BLOCK)]
    if isinstance(prompt, str):
        parts = tuple(text_part(str(piece)) for piece in blocks)
    else:
        parts = tuple(
            PromptPart(make_chunk_id([int(i) for i in piece]).encode(), len(piece))
            for piece in blocks
        )
    routed = RoutedPrompt(parts, salt, model)
    content = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    return UpstreamPrompt(COMPLETIONS, content, routed, routed.num_tokens)


def text_part(text: str) -> PromptPart:
    key = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
    return PromptPart(key, max(1, len(text) // CHARS_PER_TOKEN))


def _chunk_part(chunk: ChunkIds) -> PromptPart:
    return PromptPart(make_chunk_id(chunk).encode(), len(chunk), is_chunk=True)


def _parts(prompt: Prompt, said: set[ChunkIds]) -> tuple[list[PromptPart], list[tuple[int, int]]]:
    """Parts for routing, and spans of the chunks. `said`: chunks of the history."""
    parts, spans = [], []
    at = 0
    pieces = [(prompt.preamble, False)]
    pieces += [(part, part in said) for part in prompt.history]
    pieces += [(part, True) for part in prompt.chunks]
    pieces += [(prompt.question, False)]
    for piece, is_chunk in pieces:
        if not piece:
            continue
        parts.append(PromptPart(make_chunk_id(piece).encode(), len(piece), is_chunk))
        if is_chunk:
            spans.append((at, at + len(piece)))
        at += len(piece)
    return parts, spans
