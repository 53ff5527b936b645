"""One request of a conversation, as its prompt sees it."""

import hashlib
from collections.abc import Callable, Sequence

from kvweave.text.prompt import PastMessage
from kvweave.types import ChunkId

ChunkIds = tuple[int, ...]
Held = Callable[[Sequence[ChunkIds]], list[ChunkIds]]
Sent = Callable[[str, Sequence[ChunkIds], int], None]


class Talk:
    """Its history with chunks in it, and what it need not bring.

    For the thread that serves the request; what it reads was true when it was made.
    """

    def __init__(
        self,
        messages: tuple[PastMessage, ...],
        held: Held | None = None,
        sent: Sent | None = None,
        plain: "Talk | None" = None,
    ) -> None:
        """`plain` is the same without chunks in its history, if that may be taken instead."""
        self.messages = messages
        self.plain = plain
        self._held = held
        self._sent = sent

    @property
    def holds_chunks(self) -> bool:
        """Whether chunks stand in the history, and stay there whatever this turn finds."""
        return self.plain is None and any(message.chunks for message in self.messages)

    def held(self, chunks: Sequence[ChunkIds]) -> list[ChunkIds]:
        """Which of these chunks stand in the history."""
        return [] if self._held is None else self._held(chunks)

    def bringing(self, chunks: Sequence[ChunkIds]) -> "Talk":
        """The one to lay out for a turn that found these chunks. Every new row looks at what the
        history holds, so it is worth its place where at least half of what was found is in it."""
        if self.plain is None:
            return self
        num_held = sum(map(len, self.held(chunks)))
        return self if 2 * num_held >= max(1, sum(map(len, chunks))) else self.plain

    def sent(self, question: str, chunks: Sequence[ChunkIds], as_of: int = 0) -> None:
        """The turn went out: these chunks, found then, stood in front of this question, in this
        order."""
        if self._sent is not None:
            self._sent(question, chunks, as_of)


def digest_of(said: str) -> bytes:
    return hashlib.blake2b(said.strip().encode("utf-8", "replace"), digest_size=16).digest()


def never_gone(chunk_id: ChunkId, as_of: int) -> bool:
    return False
