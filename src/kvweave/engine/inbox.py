"""What other threads leave for the engine thread."""

import threading
from collections import deque
from typing import Generic, TypeVar

from kvweave.errors import EngineClosed

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items in the order in which they were posted. Any thread posts, the engine thread takes."""

    def __init__(self) -> None:
        self.changed = (
            threading.Condition()
        )  # guards the items; re-entrant: Worker guards more by it
        self._items: deque[T] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def post(self, item: T) -> None:
        """Append an item and wake the engine thread, without waiting. Raises EngineClosed once the
        inbox is closed: the caller then gives back what it holds."""
        with self.changed:
            if self._closed:
                raise EngineClosed("the engine is closed; open another one to ask")
            self._items.append(item)
            self.changed.notify_all()

    def take(self) -> T:
        """Return the oldest item. Raises IndexError when there is none."""
        with self.changed:
            return self._items.popleft()

    def peek(self) -> list[T]:
        """Return the items that were not taken yet. Any thread."""
        with self.changed:
            return list(self._items)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Accept no more items. Those that are there can still be taken. Harmless the second
        time."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
