"""What earlier turns of a conversation brought, so that a later turn does not bring it again.

A client sends what was said, not the chunks that stood in front of it. This store remembers them,
puts them back into the history of the next prompt, in the very place and with the very ids they
had, and leaves out of the new turn what the history holds. A message that the client cut takes its
chunks with it: they are sent again when they are wanted again. So every chunk that was retrieved is
in the prompt. A chunk whose document was deleted since stands in no history any more.

A conversation has a name, or is recognised by what was said in it (recognised.py).
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kvweave.app.answer.recognised import RecognisedTurns, SaidBefore
from kvweave.app.answer.talk import Talk, digest_of, never_gone
from kvweave.app.library.kv_maker import IsGone
from kvweave.corpus.chunker import make_chunk_id
from kvweave.kv.tree.node import ChunkRef
from kvweave.text.prompt import PastMessage
from kvweave.types import ChunkId

MAX_CONVERSATIONS = 10_000
MAX_TOKENS = 8_000_000  # of all chunks remembered, 4 bytes each


class TurnChunks(NamedTuple):
    """The chunks of a turn: what to send, and what the history has."""

    new: tuple[ChunkRef, ...]  # to be sent, in the given order, each once
    in_history: tuple[ChunkRef, ...]  # a message of the history has them


class ChunkMap:
    """Which chunks stand in which message of which conversation. Not thread-safe.

    Conversations are kept up to a number; one that was forgotten sends its chunks again.
    """

    def __init__(self, max_conversations: int = 10_000) -> None:
        self._max = max_conversations
        self._places: OrderedDict[str, dict[ChunkId, str]] = OrderedDict()

    def part(
        self, conversation: str, history: Collection[str], chunks: Sequence[ChunkRef]
    ) -> TurnChunks:
        """Part a turn's chunks. `history`: keys of the messages this prompt has before the turn.

        A key names a message and its content (a hash of it will do): an edited message is another.
        A copy whose message is gone does not count. An empty conversation name stands for none.
        """
        places = self._places.get(conversation, {}) if conversation else {}
        kept = set(history)
        new: dict[ChunkId, ChunkRef] = {}
        old: dict[ChunkId, ChunkRef] = {}
        for chunk in chunks:
            (old if places.get(chunk.id) in kept else new).setdefault(chunk.id, chunk)
        return TurnChunks(tuple(new.values()), tuple(old.values()))

    def sent(self, conversation: str, message: str, chunk_ids: Collection[ChunkId]) -> None:
        """The turn went out: these chunks stand in this message from now on."""
        if not conversation:
            return
        places = self._places.setdefault(conversation, {})
        self._places.move_to_end(conversation)
        for chunk_id in chunk_ids:
            places[chunk_id] = message
        if len(self._places) > self._max:
            self._places.popitem(last=False)

    def forget(self, conversation: str) -> None:
        """The conversation is over."""
        self._places.pop(conversation, None)

    def __len__(self) -> int:
        return len(self._places)


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


class Conversations:
    """Conversations by tenant and name, the least recently used forgotten first; those without a
    name are remembered apart, so that single questions push none of these out. Thread-safe."""

    def __init__(
        self, max_conversations: int = MAX_CONVERSATIONS, max_tokens: int = MAX_TOKENS
    ) -> None:
        self._max = max_conversations
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._turns: OrderedDict[_ConversationKey, tuple[_Turn, ...]] = OrderedDict()
        self._places = ChunkMap(max_conversations)
        self._num_tokens = 0
        self._next = 0
        self.recognised = RecognisedTurns(max_conversations, max_tokens)

    def __len__(self) -> int:
        return len(self._turns)

    def talk(
        self,
        tenant: str,
        name: str | SaidBefore | None,
        past: Sequence[PastMessage],
        is_gone: IsGone = never_gone,
        most_tokens: int | None = None,
        scope: str = "",
    ) -> Talk:
        """The next request of a conversation whose messages so far are `past`. None has no name:
        nothing is remembered. Where its chunks have more than `most_tokens`, those of the oldest
        turns are given up until half of that is left: rarely, because what stands behind them must
        be computed again."""
        if not name:
            return Talk(tuple(past))
        if isinstance(name, SaidBefore):
            return self.recognised.talk((tenant, scope), name, past, is_gone, most_tokens)
        key = _ConversationKey(tenant, scope, name)
        with self._lock:
            known = self._turns.get(key, ())
        aligned = _aligned(known, past)
        found = {place: turn.without(is_gone) for place, turn in aligned.items()}
        _give_up_oldest(found, most_tokens)
        messages = tuple(
            replace(message, chunks=tuple(map(tuple, found[place].chunks)))
            if place in found
            else message
            for place, message in enumerate(past)
        )
        turns = [found[place] for place in sorted(found)]
        return Talk(messages, partial(self.held, key, turns), partial(self.add, key, turns))

    def part(self, scope: str) -> "ConversationScope":
        """Conversations of one knowledge base among many: those of others are unknown there."""
        return ConversationScope(self, scope)

    def held(
        self, key: "_ConversationKey", turns: Sequence[_Turn], chunks: Sequence[tuple[int, ...]]
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
        key: "_ConversationKey",
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
                str(self._next),
                digest_of(question),
                tuple(array("i", ids) for ids in chunks),
                as_of,
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

    def _drop(self, key: "_ConversationKey") -> None:
        self._num_tokens -= sum(turn.num_tokens for turn in self._turns.pop(key, ()))


class ConversationScope(NamedTuple):
    """Conversations within a scope, remembered with all others."""

    whole: Conversations
    scope: str

    def talk(
        self,
        tenant: str,
        name: str | SaidBefore | None,
        past: Sequence[PastMessage],
        is_gone: IsGone = never_gone,
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
        digest = digest_of(past[place].content)
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
