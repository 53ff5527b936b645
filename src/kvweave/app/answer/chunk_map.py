"""What a conversation already holds need not be sent again (after CRAFT).

A chunk that an earlier turn brought is still in the prompt, as part of the history, so a later turn
sends only what is new. That holds only while its copy is really there: clients cut long histories.
The map therefore remembers *in which message* a copy stands, is told with every request which
messages the prompt has, and counts no others. So every chunk that retrieval returned is in the
final prompt, in the history or among the new ones.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvweave.kv.tree.node import ChunkRef
from kvweave.types import ChunkId


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
