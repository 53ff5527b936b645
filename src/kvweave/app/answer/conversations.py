"""What earlier turns of a conversation brought, so that a later turn does not bring it again.

A client sends what was said, not the chunks that stood in front of it. This store remembers them,
puts them back into the history of the next prompt, in the very place and with the very ids they
had, and leaves out of the new turn what the history holds. A message that the client cut takes its
chunks with it: they are sent again when they are wanted again. So every chunk that was retrieved is
in the prompt. A chunk whose document was deleted since stands in no history any more.

A conversation that has no name is recognised by what its user said in it so far. Whoever says the
same, searching in the same way, would have found the same chunks: nobody learns of another by it.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvweave.app.library.kv_maker import IsGone
from kvweave.app.question import Question
from kvweave.corpus.chunker import make_chunk_id
from kvweave.corpus.search import SearchOptions
from kvweave.kv.tree.node import ChunkRef
from kvweave.plan.dedup import ChunkMap
from kvweave.text.prompt import PastMessage
from kvweave.types import ChunkId

MAX_CONVERSATIONS = 10_000
MAX_TOKENS = 8_000_000  # of all chunks remembered, 4 bytes each


def _never(chunk_id: ChunkId, as_of: int) -> bool:
    return False


class _Turn(NamedTuple):
    """A user's message that went out, and the chunks in front of it."""

    number: str  # names it within its conversation
    digest: bytes  # of what the user wrote
    chunks: "tuple[array[int], ...]"
    as_of: int = 0  # when they were found, see engine/tombstones.py

    def without(self, is_gone: IsGone) -> "_Turn":
        """The same, less the chunks that were deleted since."""
        left = tuple(ids for ids in self.chunks if not is_gone(make_chunk_id(ids), self.as_of))
        return self if len(left) == len(self.chunks) else self._replace(chunks=left)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.chunks))


class _ConversationKey(NamedTuple):
    """Where a conversation is known."""

    tenant: str
    scope: str
    name: str

    def __str__(self) -> str:
        """For those that know keys as text: no part can reach into another."""
        return "".join(f"{len(part)}:{part}" for part in self)


class Recognised(NamedTuple):
    """Stands for the name of a conversation that has none: what its user said so far, and how
    chunks were searched for. The next turn has another."""

    digest: bytes

    @classmethod
    def by(cls, past: Sequence[PastMessage], search: SearchOptions) -> "Recognised":
        """By what was said in `past` where chunks are found so: a filter may be what keeps people
        apart. What the assistant said is left out, because clients trim it."""
        name = cls(_digest(repr(search)))
        for message in past:
            if message.role == "user":
                name = name.behind(message.content)
        return name

    def behind(self, question: str) -> "Recognised":
        """After this question, too."""
        return Recognised(_digest_of(self.digest + _digest(question)))


def conversation_name(
    question: Question, past: Sequence[PastMessage], *, is_searched: bool
) -> str | Recognised | None:
    """How the conversation of a question is known; None: it is not remembered. One that brings its
    own documents decides itself what stands in front of what."""
    if question.conversation_id is not None:
        return question.conversation_id
    if not (question.recognise and is_searched and question.documents is None):
        return None
    return Recognised.by(past, question.search)


class Talk:
    """One request of a conversation: its history with chunks in it, and what it need not bring.

    For the thread that serves the request; what it reads was true when it was made.
    """

    def __init__(
        self,
        messages: tuple[PastMessage, ...],
        store: "_TurnStore | None" = None,
        key: "_ConversationKey | None" = None,
        turns: Sequence[_Turn] = (),
        recognised: Recognised | None = None,
    ) -> None:
        self.messages = messages
        self._store = store
        self._key = key
        self._turns = tuple(turns)  # those whose message is in the history
        self._recognised = recognised  # None: it has a name, or is not remembered

    @property
    def holds_chunks(self) -> bool:
        return any(message.chunks for message in self.messages)

    @property
    def may_be_plain(self) -> bool:
        """Whether nobody asked for the chunks that it holds: it was recognised."""
        return self._recognised is not None and self.holds_chunks

    def plain(self) -> "Talk":
        """The same as the client sent it: chunks of earlier turns stand nowhere. They are known to
        the next turn nevertheless."""
        messages = tuple(replace(message, chunks=()) for message in self.messages)
        return Talk(messages, self._store, self._key, self._turns, self._recognised)

    def held(self, chunks: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Which of these chunks stand in the history."""
        if self._store is None or self._key is None or not self.holds_chunks:
            return []
        return self._store.held(self._key, self._turns, chunks)

    def sent(self, question: str, chunks: Sequence[tuple[int, ...]], as_of: int = 0) -> None:
        """The turn went out: these chunks, found then, stood in front of this question, in this
        order."""
        if self._store is None or self._key is None:
            return
        key = self._key
        if self._recognised is not None:
            key = key._replace(name=self._recognised.behind(question).digest.hex())
        self._store.add(key, self._turns, question, chunks, as_of)


class Conversations:
    """Conversations by tenant and name, or by what was said in them. Those with a name have room of
    their own: single questions, each of which might go on, do not push them out. Thread-safe."""

    def __init__(
        self, max_conversations: int = MAX_CONVERSATIONS, max_tokens: int = MAX_TOKENS
    ) -> None:
        self._named = _TurnStore(max_conversations, max_tokens)
        self._recognised = _TurnStore(max_conversations, max_tokens)

    def __len__(self) -> int:
        """Those with a name."""
        return len(self._named)

    def talk(
        self,
        tenant: str,
        name: str | Recognised | None,
        past: Sequence[PastMessage],
        is_gone: IsGone = _never,
        most_tokens: int | None = None,
        scope: str = "",
    ) -> Talk:
        """The next request of a conversation whose messages so far are `past`. None has no name:
        nothing is remembered. Where its chunks have more than `most_tokens`, those of the oldest
        turns are given up until half of that is left: rarely, because what stands behind them must
        be computed again."""
        if not name:
            return Talk(tuple(past))
        if isinstance(name, Recognised):
            store, recognised = self._recognised, name
            key = _ConversationKey(tenant, scope, name.digest.hex())
        else:
            store, recognised = self._named, None
            key = _ConversationKey(tenant, scope, name)
        aligned = _aligned(store.turns(key), past)
        found = {place: turn.without(is_gone) for place, turn in aligned.items()}
        _give_up_oldest(found, most_tokens)
        messages = tuple(
            replace(message, chunks=tuple(map(tuple, found[place].chunks)))
            if place in found
            else message
            for place, message in enumerate(past)
        )
        turns = [found[place] for place in sorted(found)]
        return Talk(messages, store, key, turns, recognised)

    def part(self, scope: str) -> "ConversationScope":
        """Conversations of one knowledge base among many: those of others are unknown there."""
        return ConversationScope(self, scope)


class _TurnStore:
    """Turns by conversation, the least recently used forgotten first. Thread-safe."""

    def __init__(self, max_conversations: int, max_tokens: int) -> None:
        self._max = max_conversations
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._turns: OrderedDict[_ConversationKey, tuple[_Turn, ...]] = OrderedDict()
        self._places = ChunkMap(max_conversations)
        self._num_tokens = 0
        self._next = 0

    def __len__(self) -> int:
        return len(self._turns)

    def turns(self, key: _ConversationKey) -> tuple[_Turn, ...]:
        """Those that are known."""
        with self._lock:
            return self._turns.get(key, ())

    def held(
        self, key: _ConversationKey, turns: Sequence[_Turn], chunks: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """Chunks that stand in front of one of these turns."""
        refs = [ChunkRef(make_chunk_id(ids), len(ids)) for ids in chunks]
        with self._lock:
            parted = self._places.part(str(key), [turn.number for turn in turns], refs)
        names = {chunk.id for chunk in parted.in_history}
        names &= {make_chunk_id(ids) for turn in turns for ids in turn.chunks}  # not deleted since
        return [ids for ids, ref in zip(chunks, refs, strict=True) if ref.id in names]

    def add(
        self,
        key: _ConversationKey,
        turns: Sequence[_Turn],
        question: str,
        chunks: Sequence[tuple[int, ...]],
        as_of: int = 0,
    ) -> None:
        """A turn went out behind these. What stood elsewhere in the conversation was cut or edited
        away."""
        with self._lock:
            self._next += 1
            turn = _Turn(
                str(self._next), _digest(question), tuple(array("i", ids) for ids in chunks), as_of
            )
            self._drop(key)
            self._turns[key] = (*turns, turn)
            self._num_tokens += sum(t.num_tokens for t in self._turns[key])
            for each in self._turns[key]:
                self._places.sent(
                    str(key), each.number, [make_chunk_id(ids) for ids in each.chunks]
                )
            while len(self._turns) > self._max or (
                self._num_tokens > self._max_tokens and len(self._turns) > 1
            ):
                oldest = next(iter(self._turns))
                self._drop(oldest)
                self._places.forget(str(oldest))

    def _drop(self, key: _ConversationKey) -> None:
        self._num_tokens -= sum(turn.num_tokens for turn in self._turns.pop(key, ()))


class ConversationScope(NamedTuple):
    """Conversations within a scope, remembered with all others."""

    whole: Conversations
    scope: str

    def talk(
        self,
        tenant: str,
        name: str | Recognised | None,
        past: Sequence[PastMessage],
        is_gone: IsGone = _never,
        most_tokens: int | None = None,
    ) -> Talk:
        """As `Conversations.talk`."""
        return self.whole.talk(tenant, name, past, is_gone, most_tokens, self.scope)


def _aligned(turns: Sequence[_Turn], past: Sequence[PastMessage]) -> dict[int, _Turn]:
    """Which message of the history is which turn, by what was said, latest first: clients cut from
    the front, and "go on" may have been said more than once."""
    found: dict[int, _Turn] = {}
    left = list(turns)
    for place in reversed(range(len(past))):
        if past[place].role != "user":
            continue
        digest = _digest(past[place].content)
        at = next((i for i in reversed(range(len(left))) if left[i].digest == digest), None)
        if at is not None:
            found[place] = left[at]
            del left[at:]
    return found


def _give_up_oldest(found: dict[int, _Turn], most_tokens: int | None) -> None:
    """Take the chunks of the oldest turns away where all of them have too many tokens."""
    left = sum(turn.num_tokens for turn in found.values())
    if most_tokens is None or left <= most_tokens:
        return
    for place in sorted(found):
        if left <= most_tokens // 2:
            break
        left -= found[place].num_tokens
        found[place] = found[place]._replace(chunks=())


def _digest(content: str) -> bytes:
    return _digest_of(content.strip().encode("utf-8", "replace"))


def _digest_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
