"""What earlier turns of a conversation brought, so that a later turn does not bring it again.

A client sends what was said, not the chunks that stood in front of it. They are remembered here and
put back into the history of the next prompt, in the very place and with the very ids they had; a
new turn leaves out what the history holds. A message that the client cut takes its chunks with it:
they are sent again when they are wanted again. So every chunk that was retrieved is in the prompt.
A chunk whose document was deleted since stands in no history any more.

A conversation has a name, or is recognised by what its user said so far. A chat client sends the
whole conversation with every question. A turn is kept under the digest of all that its user had
said by then, so the next request finds it by the messages it brings, and the prompt goes on from
the one that was sent. What the assistant said does not count: clients trim it.

The same words in the same knowledge base find the same chunks, whoever says them. A filter may be
what keeps people apart, and what it lets through may change, so questions with one are not
recognised at all. Which prompt is laid out depends on messages and chunks alone, never on prices or
on what else runs: the same request gets the same prompt twice.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from kvweave.app.answer.question import Question
from kvweave.corpus.chunker import make_chunk_id
from kvweave.text.prompt import PastMessage
from kvweave.types import ChunkId

MAX_CONVERSATIONS = 10_000
MAX_TOKENS = 8_000_000  # of all chunks remembered, 4 bytes each

ChunkIds = tuple[int, ...]
Remember = Callable[[str, Sequence[ChunkIds], int], None]  # a question, its chunks, when found
IsGone = Callable[[ChunkId, int], bool]  # whether a chunk found then was deleted since


def never_gone(chunk_id: ChunkId, as_of: int) -> bool:
    return False


class Talk:
    """One request of a conversation: its history with chunks in it, and what it need not bring.

    For the thread that serves the request; what it reads was true when it was made.
    """

    def __init__(
        self,
        messages: tuple[PastMessage, ...],
        remember: Remember | None = None,
        plain: "Talk | None" = None,
    ) -> None:
        """`plain` has no chunks in its history and may be taken instead; None: it may not."""
        self.messages = messages
        self.plain = plain
        self._remember = remember
        self._in_history = {ids for message in messages for ids in message.chunks}

    @property
    def holds_chunks(self) -> bool:
        """Whether chunks stand in the history, and stay there whatever this turn finds."""
        return self.plain is None and bool(self._in_history)

    def find_in_history(self, chunks: Sequence[ChunkIds]) -> list[ChunkIds]:
        """Which of these chunks stand in the history."""
        return [ids for ids in chunks if ids in self._in_history]

    def choose_history(self, chunks: Sequence[ChunkIds]) -> "Talk":
        """Return the talk to lay out for a turn that found these chunks. Every new row looks at
        what the history holds, so it is worth its place where at least half of what was found is
        in it."""
        if self.plain is None:
            return self
        num_held = sum(map(len, self.find_in_history(chunks)))
        return self if 2 * num_held >= max(1, sum(map(len, chunks))) else self.plain

    def remember(self, question: str, chunks: Sequence[ChunkIds], as_of: int = 0) -> None:
        """Remember that a turn went out: these chunks, found then, stood in front of this question,
        in this order."""
        if self._remember is not None:
            self._remember(question, chunks, as_of)


class SaidBefore(NamedTuple):
    """Stands for the name of a conversation: digests of what its user had said after each of the
    messages, beginning with how chunks are searched for."""

    digests: tuple[bytes, ...]

    @classmethod
    def from_history(cls, question: Question, past: Sequence[PastMessage]) -> "SaidBefore":
        how = (question.search, question.num_chunks, question.rewrite)
        digests = [digest_of(repr(how))]
        for message in past:
            if message.role == "user":
                digests.append(_digest_behind(digests[-1], message.content))
        return cls(tuple(digests))


def conversation_name(
    question: Question, past: Sequence[PastMessage], *, is_searched: bool
) -> str | SaidBefore | None:
    """How the conversation of a question is known; None: it is not remembered. A question with
    documents of its own decides itself what stands in front of what."""
    if question.conversation_id is not None:
        return question.conversation_id
    finds = is_searched and question.documents is None and not question.filter
    return SaidBefore.from_history(question, past) if question.recognise and finds else None


class _Turn(NamedTuple):
    """A user's message that went out, and the chunks in front of it."""

    digest: bytes  # of what the user wrote, or had written by then
    chunks: "tuple[array[int], ...]"
    as_of: int = 0  # when they were found, see engine/tombstones.py
    is_plain: bool = False  # no chunks of earlier turns stood in its prompt

    @classmethod
    def from_ids(
        cls, digest: bytes, chunks: Sequence[ChunkIds], as_of: int, *, is_plain: bool = False
    ) -> "_Turn":
        return cls(digest, tuple(array("i", ids) for ids in chunks), as_of, is_plain)

    def drop_deleted(self, is_gone: IsGone) -> "_Turn":
        """This turn less the chunks that were deleted since."""
        left = tuple(ids for ids in self.chunks if not is_gone(make_chunk_id(ids), self.as_of))
        return self if len(left) == len(self.chunks) else self._replace(chunks=left)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.chunks))


class _ConversationKey(NamedTuple):
    """Where a conversation is known, or a turn without a name for it."""

    tenant: str
    scope: str
    name: str | bytes


K = TypeVar("K")


class _TurnStore(Generic[K]):
    """Turns by some key, the least recently used forgotten first. Its owner holds a lock."""

    def __init__(self, most: int, most_tokens: int) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._turns: OrderedDict[K, tuple[_Turn, ...]] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._turns)

    def get(self, key: K, *, touch: bool = False) -> tuple[_Turn, ...]:
        """Return the turns of a key; with `touch` it counts as used."""
        if touch and key in self._turns:
            self._turns.move_to_end(key)
        return self._turns.get(key, ())

    def put(self, key: K, turns: tuple[_Turn, ...]) -> None:
        """Keep these turns in place of those that the key had."""
        self._drop(key)
        self._turns[key] = turns
        self._num_tokens += sum(turn.num_tokens for turn in turns)
        while len(self._turns) > self._most or (
            self._num_tokens > self._most_tokens and len(self._turns) > 1
        ):
            self._drop(next(iter(self._turns)))

    def _drop(self, key: K) -> None:
        self._num_tokens -= sum(turn.num_tokens for turn in self._turns.pop(key, ()))


class Conversations:
    """Conversations by tenant and name, and apart from them the turns of those without a name, so
    that single questions push no named ones out. Thread-safe."""

    def __init__(
        self, max_conversations: int = MAX_CONVERSATIONS, max_tokens: int = MAX_TOKENS
    ) -> None:
        self._lock = threading.Lock()
        self._named: _TurnStore[_ConversationKey] = _TurnStore(max_conversations, max_tokens)
        self.recognised: _TurnStore[_ConversationKey] = _TurnStore(max_conversations, max_tokens)
        self.scope = ""  # what was said in another one is unknown in this

    def __len__(self) -> int:
        return len(self._named)

    def talk(
        self,
        tenant: str,
        name: str | SaidBefore | None,
        past: Sequence[PastMessage],
        is_gone: IsGone = never_gone,
        most_tokens: int | None = None,
    ) -> Talk:
        """Recall the conversation whose messages so far are `past`. None has no name: nothing is
        remembered. Where the chunks of a named one have more than `most_tokens`, those of the
        oldest turns are given up until half of that is left: rarely, because what stands behind
        them must be computed again. One that is recognised has no chunks then."""
        if not name:
            return Talk(tuple(past))
        if isinstance(name, SaidBefore):
            return self._recognise(tenant, name, past, is_gone, most_tokens)
        key = _ConversationKey(tenant, self.scope, name)
        with self._lock:
            known = self._named.get(key)
        turns = {place: turn.drop_deleted(is_gone) for place, turn in _align(known, past).items()}
        _give_up_oldest(turns, most_tokens)
        kept = tuple(turns[place] for place in sorted(turns))
        return Talk(_with_chunks(past, turns), partial(self._add_named, key, kept))

    def part(self, scope: str) -> "Conversations":
        """Conversations of one knowledge base among many, remembered with all others."""
        part = copy(self)
        part.scope = scope
        return part

    def _add_named(
        self,
        key: _ConversationKey,
        turns: tuple[_Turn, ...],
        question: str,
        chunks: Sequence[ChunkIds],
        as_of: int,
    ) -> None:
        """Keep a turn that went out behind these. What stood elsewhere in the conversation was cut
        or edited away."""
        with self._lock:
            self._named.put(key, (*turns, _Turn.from_ids(digest_of(question), chunks, as_of)))

    def _recognise(
        self,
        tenant: str,
        said: SaidBefore,
        past: Sequence[PastMessage],
        is_gone: IsGone,
        most_tokens: int | None,
    ) -> Talk:
        key = partial(_ConversationKey, tenant, self.scope)
        last = said.digests[-1]

        def add(is_plain: bool, question: str, chunks: Sequence[ChunkIds], as_of: int) -> None:
            digest = _digest_behind(last, question)
            turn = _Turn.from_ids(digest, chunks, as_of, is_plain=is_plain)
            with self._lock:
                self.recognised.put(key(digest), (turn,))

        plain = Talk(tuple(past), partial(add, True))
        users = [place for place, message in enumerate(past) if message.role == "user"]
        turns: dict[int, _Turn] = {}
        for place, digest in zip(reversed(users), reversed(said.digests), strict=False):
            with self._lock:
                turn = next(iter(self.recognised.get(key(digest), touch=True)), None)
            if turn is None:
                break
            turns[place] = turn.drop_deleted(is_gone)
            if turn.is_plain:
                break
        num_tokens = sum(turn.num_tokens for turn in turns.values())
        if not num_tokens or (most_tokens is not None and num_tokens > most_tokens):
            return plain
        return Talk(_with_chunks(past, turns), partial(add, False), plain)


def digest_of(said: str) -> bytes:
    return hashlib.blake2b(said.strip().encode("utf-8", "replace"), digest_size=16).digest()


def _digest_behind(before: bytes, question: str) -> bytes:
    return digest_of(before.hex() + digest_of(question).hex())


def _with_chunks(
    past: Sequence[PastMessage], turns: Mapping[int, _Turn]
) -> tuple[PastMessage, ...]:
    """Messages with the chunks of the turns that they are, by place."""
    return tuple(
        replace(message, chunks=tuple(map(tuple, turns[place].chunks)))
        if place in turns
        else message
        for place, message in enumerate(past)
    )


def _align(turns: Sequence[_Turn], past: Sequence[PastMessage]) -> dict[int, _Turn]:
    """Find which message of the history is which turn, by what was said, latest first: clients cut
    from the front, and "go on" may have been said more than once."""
    found: dict[int, _Turn] = {}
    left = list(turns)
    for place in reversed(range(len(past))):
        if past[place].role != "user":
            continue
        digest = digest_of(past[place].content)
        at = next((i for i in reversed(range(len(left))) if left[i].digest == digest), None)
        if at is not None:
            found[place] = left[at]
            del left[at:]
    return found


def _give_up_oldest(turns: dict[int, _Turn], most_tokens: int | None) -> None:
    """Take the chunks of the oldest turns away where all of them have too many tokens."""
    left = sum(turn.num_tokens for turn in turns.values())
    if most_tokens is None or left <= most_tokens:
        return
    for place in sorted(turns):
        if left <= most_tokens // 2:
            break
        left -= turns[place].num_tokens
        turns[place] = turns[place]._replace(chunks=())
