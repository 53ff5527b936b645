"""Conversations that have no name, known by what their user said so far.

A chat client sends the whole conversation with every question. A turn is kept under the digest of
all that its user had said by then, so the next request finds it by the messages it brings, and the
prompt goes on from the one that was sent. What the assistant said does not count: clients trim it.

The same words in the same knowledge base find the same chunks, whoever says them. A filter may be
what keeps people apart, and what it lets through may change, so questions with one are not
recognised at all. Which prompt is laid out depends on messages and chunks alone, never on prices or
on what else runs: the same request gets the same prompt twice.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kvweave.app.answer.question import Question
from kvweave.app.answer.talk import ChunkIds, Talk, digest_of
from kvweave.app.library.kv_maker import IsGone
from kvweave.corpus.chunker import make_chunk_id
from kvweave.text.prompt import PastMessage

Place = tuple[str, str]  # a tenant, and a scope within


class SaidBefore(NamedTuple):
    """Stands for the name of a conversation: digests of what its user had said after each of the
    messages, beginning with how chunks are searched for."""

    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, question: Question, past: Sequence[PastMessage]) -> "SaidBefore":
        how = (question.search, question.num_chunks, question.rewrite)
        found = [digest_of(repr(how))]
        for message in past:
            if message.role == "user":
                found.append(_behind(found[-1], message.content))
        return cls(tuple(found))


class _SentTurn(NamedTuple):
    """A question that went out, and the chunks in front of it."""

    chunks: "tuple[array[int], ...]"
    is_plain: bool  # no chunks of earlier turns stood in its prompt
    as_of: int  # when they were found, see engine/tombstones.py


def conversation_name(
    question: Question, past: Sequence[PastMessage], *, is_searched: bool
) -> str | SaidBefore | None:
    """How the conversation of a question is known; None: it is not remembered. A question with
    documents of its own decides itself what stands in front of what."""
    if question.conversation_id is not None:
        return question.conversation_id
    finds = is_searched and question.documents is None and not question.filter
    return SaidBefore.of(question, past) if question.recognise and finds else None


class RecognisedTurns:
    """Turns by what was said, the least recently used forgotten first. Thread-safe."""

    def __init__(self, max_turns: int, max_tokens: int) -> None:
        self._max = max_turns
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._turns: OrderedDict[tuple[Place, bytes], _SentTurn] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._turns)

    def talk(
        self,
        place: Place,
        said: SaidBefore,
        past: Sequence[PastMessage],
        is_gone: IsGone,
        most_tokens: int | None,
    ) -> Talk:
        """The next request of a conversation whose messages so far are `past`. One whose chunks
        have more than `most_tokens`, or of whose last prompt nothing is known, has none."""
        last = said.digests[-1]
        plain = Talk(tuple(past), sent=partial(self._add, place, last, True))
        found = self._found(place, said.digests[1:], is_gone)
        num_tokens = sum(len(ids) for chunks in found for ids in chunks)
        if not num_tokens or (most_tokens is not None and num_tokens > most_tokens):
            return plain
        users = iter(found)
        messages = tuple(
            replace(message, chunks=next(users)) if message.role == "user" else message
            for message in past
        )
        kept = {make_chunk_id(ids) for chunks in found for ids in chunks}

        def held(chunks: Sequence[ChunkIds]) -> list[ChunkIds]:
            return [ids for ids in chunks if make_chunk_id(ids) in kept]

        return Talk(messages, held, partial(self._add, place, last, False), plain)

    def _found(
        self, place: Place, digests: Sequence[bytes], is_gone: IsGone
    ) -> list[tuple[ChunkIds, ...]]:
        """Chunks in front of each of the user's messages, as the last prompt had them."""
        found: list[tuple[ChunkIds, ...]] = [() for _ in digests]
        for number in reversed(range(len(digests))):
            key = place, digests[number]
            with self._lock:
                turn = self._turns.get(key)
                if turn is not None:
                    self._turns.move_to_end(key)
            if turn is None:
                break
            chunks = [tuple(ids) for ids in turn.chunks]
            found[number] = tuple(c for c in chunks if not is_gone(make_chunk_id(c), turn.as_of))
            if turn.is_plain:
                break
        return found

    def _add(
        self,
        place: Place,
        before: bytes,
        is_plain: bool,
        question: str,
        chunks: Sequence[ChunkIds],
        as_of: int,
    ) -> None:
        """A turn went out behind what was said `before`."""
        key = place, _behind(before, question)
        turn = _SentTurn(tuple(array("i", ids) for ids in chunks), is_plain, as_of)
        with self._lock:
            self._drop(key)
            self._turns[key] = turn
            self._num_tokens += sum(map(len, turn.chunks))
            while len(self._turns) > self._max or (
                self._num_tokens > self._max_tokens and len(self._turns) > 1
            ):
                self._drop(next(iter(self._turns)))

    def _drop(self, key: tuple[Place, bytes]) -> None:
        turn = self._turns.pop(key, None)
        if turn is not None:
            self._num_tokens -= sum(map(len, turn.chunks))


def _behind(before: bytes, question: str) -> bytes:
    return digest_of(before.hex() + digest_of(question).hex())
