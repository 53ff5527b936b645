"""Which chunks a conversation has been shown, so that each stands in its prompt once.

The chunks of earlier turns stay in front, in the order they came, and new ones follow. So the
beginning of the prompt is the same from turn to turn, and what was computed for it can be reused.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

Ids = tuple[int, ...]


class Memory:
    """The chunks of one conversation. Safe to use from any thread."""

    def __init__(self, max_tokens: int) -> None:
        """Beyond `max_tokens` the chunks that came first are left out again."""
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._chunks: tuple[Ids, ...] = ()

    def together(self, chunks: Sequence[Ids]) -> list[Ids]:
        """What was there and what is new, each once. A turn's own chunks are never left out."""
        with self._lock:
            old = [chunk for chunk in self._chunks if chunk not in set(chunks)]
            room = self._max_tokens - sum(len(chunk) for chunk in dict.fromkeys(chunks))
            dropped: set[Ids] = set()
            for chunk in old:
                if sum(len(c) for c in old if c not in dropped) <= room:
                    break
                dropped.add(chunk)
            kept = [chunk for chunk in self._chunks if chunk not in dropped]
            self._chunks = tuple(dict.fromkeys([*kept, *chunks]))
            return list(self._chunks)


class Conversations:
    """Memories by name; the one not heard of for longest is forgotten first. From any thread."""

    def __init__(self, max_tokens: int, max_conversations: int = 10_000) -> None:
        self._max_tokens = max_tokens
        self._max = max_conversations
        self._lock = threading.Lock()
        self._memories: OrderedDict[tuple[str, ...], Memory] = OrderedDict()

    def recall(self, *name: str) -> Memory:
        """The memory of a conversation, empty if it is new. The parts of `name` stay apart."""
        with self._lock:
            memory = self._memories.setdefault(name, Memory(self._max_tokens))
            self._memories.move_to_end(name)
            if len(self._memories) > self._max:
                self._memories.popitem(last=False)
            return memory

    def __len__(self) -> int:
        with self._lock:
            return len(self._memories)
