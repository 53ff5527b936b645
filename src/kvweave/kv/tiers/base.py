"""The contract of a tier: a place that keeps bytes under keys.

A tier knows bytes, not tensors, headers, budgets or leases: `store` owns those. What a tier is
given are whole chunk objects (see `format`), what it is asked for are ranges of them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from kvweave.kv.format.header import Buffer, Reader
from kvweave.kv.format.keys import ChunkKey, ChunkTag, tag_of


class StoredObject(NamedTuple):
    """One object as a tier lists it."""

    key: ChunkKey
    size_bytes: int
    written_s: float  # seconds since the epoch; 0.0 where the tier does not know


class PreludeReader:
    """An object on a server, whose first bytes came along when it was opened; `fetch` reads others,
    as `Reader.read` does. Connections belong to the tier."""

    def __init__(
        self, size_bytes: int, prelude: bytes, fetch: Callable[[int, memoryview], None]
    ) -> None:
        self.size_bytes = size_bytes
        self._prelude = prelude
        self._fetch = fetch

    def read(self, offset: int, out: memoryview) -> None:
        end = offset + len(out)
        if end <= len(self._prelude):
            out[:] = self._prelude[offset:end]
        else:
            self._fetch(offset, out)

    def close(self) -> None:
        """Holds nothing."""


def among(keys: Iterable[ChunkKey], tags: Collection[ChunkTag]) -> list[ChunkKey]:
    """Select the keys that belong to one of these chunks."""
    return [key for key in keys if tag_of(key) in tags]


class Tier(Protocol):
    """Keeps chunk objects.

    Threads: every method may be called from any thread, several at once.
    Blocking: any method may block on IO, so they are called from IO threads only; a remote tier
    gives up after its configured timeout.
    Ownership: buffers belong to the caller, before and after the call. A tier keeps no reference
    to `parts` past the return of `write`.
    Failure: an ordinary "no" is None or False. TierError means the tier could not do it; then
    nothing was changed, except that a failed `write` or `delete` may have happened. A half-written
    object is never visible.
    Twice: writing a key again is harmless, equal keys name equal bytes and the last write wins
    whole. Deleting what is not there returns False.
    Durability: after `write` returned True the object survives the death of this process, and the
    loss of power, exactly where `durable` says so.
    """

    name: str  # for metrics and messages: host, disk, redis, s3

    @property
    def place(self) -> str:
        """Which one it is, without secrets: equal for all who share it, in any process."""
        ...

    @property
    def durable(self) -> bool:
        """What `write` acknowledged survives the death of this process."""
        ...

    @property
    def remote(self) -> bool:
        """Behind a network, shared with others, with a budget and an eviction of its own."""
        ...

    @property
    def writes_at_once(self) -> int:
        """Writes that gain by being under way at the same time."""
        ...

    @property
    def best_read_bytes(self) -> int:
        """Smaller reads waste round trips: layers are read in runs of about this size."""
        ...

    def size(self, key: ChunkKey) -> int | None:
        """Bytes of an object, None if it is not here. Changes nothing."""
        ...

    def open(self, key: ChunkKey) -> Reader | None:
        """A reader, None if the object is not here."""
        ...

    def write(self, key: ChunkKey, parts: Sequence[Buffer]) -> bool:
        """Keep the concatenation of `parts`. False: no room."""
        ...

    def delete(self, key: ChunkKey) -> bool:
        """Delete an object. True if it was here."""
        ...

    def quarantine(self, key: ChunkKey) -> bool:
        """Take a damaged object out of sight: aside where there is room to look at it later,
        otherwise away. True if it was here."""
        ...

    def scan(self) -> Iterator[StoredObject]:
        """Every object, in no order. Objects that come or go meanwhile may or may not appear."""
        ...

    def tagged_keys(self, tags: Collection[ChunkTag]) -> list[ChunkKey]:
        """Keys of every object that belongs to one of these chunks, by name alone."""
        ...

    def check(self) -> None:
        """Raise TierError unless the tier answers now: a server that is there and lets us in, a
        folder that can be read."""
        ...

    def close(self) -> None:
        """Let go of connections and memory. Safe to call twice; no other method is called then."""
        ...
