"""Host memory. The fastest tier, the simplest to read, and where loads land.

Besides the contract: `reserve` gives memory to fill in place, `keep` makes it an object. Its bytes
stay where they are until the key is deleted; the store sees to it that no leased key is deleted.

An object may be kept without some of its extras (`is_whole=False`). It takes its full place, counts
and is listed; `open`, which gives objects whole, does not find it.
"""

import threading
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch

from kvweave.errors import TierCorrupt, TierError
from kvweave.kv.format.header import ALIGN, Buffer
from kvweave.kv.format.keys import ChunkKey, ChunkTag
from kvweave.kv.format.memory import Arena, Memory, new_memory, slice_memory
from kvweave.kv.tiers.base import StoredObject, among
from kvweave.kv.tiers.config import HostTierConfig


class _HostObject(NamedTuple):
    memory: Memory
    size_bytes: int
    is_whole: bool = True


class HostReader:
    """Reads a copy under the tier's lock: a deleted object gives TierError, never other bytes."""

    def __init__(self, tier: "HostTier", key: ChunkKey, kept: _HostObject) -> None:
        self.size_bytes = kept.size_bytes
        self._tier = tier
        self._key = key
        self._kept = kept

    def read(self, offset: int, out: memoryview) -> None:
        if offset + len(out) > self.size_bytes:
            raise TierCorrupt(f"object ends at {self.size_bytes}, wanted {offset + len(out)}")
        self._tier._copy_out(self._key, self._kept, offset, out)

    def close(self) -> None:
        """Holds nothing."""


class HostTier:
    """One arena of host memory; page-locked where CUDA is, unless told otherwise."""

    durable: ClassVar[bool] = False
    remote: ClassVar[bool] = False
    writes_at_once: ClassVar[int] = 1
    best_read_bytes: ClassVar[int] = 1 << 20

    def __init__(self, cfg: HostTierConfig) -> None:
        self.name = "host"
        self.place = "host memory"
        self.pinned = torch.cuda.is_available() if cfg.pinned is None else cfg.pinned
        self._lock = threading.Lock()
        self._arena = Arena(cfg.capacity_bytes, ALIGN)
        self.capacity_bytes = self._arena.capacity_bytes
        self._memory: Memory | None = _take(self.capacity_bytes, pinned=self.pinned)
        self._kept: dict[ChunkKey, _HostObject] = {}

    def size(self, key: ChunkKey) -> int | None:
        kept = self._kept.get(key)
        return None if kept is None else kept.size_bytes

    def open(self, key: ChunkKey) -> HostReader | None:
        kept = self._kept.get(key)
        return HostReader(self, key, kept) if kept is not None and kept.is_whole else None

    def write(self, key: ChunkKey, parts: Sequence[Buffer]) -> bool:
        size = sum(len(part) for part in parts)
        memory = self.reserve(size)
        if memory is None:
            return False
        at = 0
        for part in parts:
            memory.view[at : at + len(part)] = part
            at += len(part)
        self.keep(key, memory, size)
        return True

    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is not None:
                self._give_back(kept.memory)
        return kept is not None

    def detach(self, key: ChunkKey) -> Memory | None:
        """Take an object away but leave its bytes where they are, until `cancel` frees them: an
        object saved under that key meanwhile is another one and stays."""
        with self._lock:
            kept = self._kept.pop(key, None)
        return None if kept is None else kept.memory

    def quarantine(self, key: ChunkKey) -> bool:
        return self.delete(key)

    def scan(self) -> Iterator[StoredObject]:
        with self._lock:
            kept = list(self._kept.items())
        for key, each in kept:
            yield StoredObject(key, each.size_bytes, 0.0)

    def tagged_keys(self, tags: Collection[ChunkTag]) -> list[ChunkKey]:
        return among((each.key for each in self.scan()), tags)

    def check(self) -> None:
        """Do nothing: host memory is always there."""

    def close(self) -> None:
        """Views of the memory keep it alive until they go."""
        with self._lock:
            self._memory = None
            self._kept.clear()

    def footprint(self, size_bytes: int) -> int:
        """Arena bytes an object of this size occupies."""
        return self._arena.round(size_bytes)

    def reserve(self, size_bytes: int) -> Memory | None:
        """Memory to fill, not yet an object. None: no hole is large enough."""
        with self._lock:
            if self._memory is None:
                raise TierError("the host tier was closed")
            start = self._arena.take(size_bytes)
            return None if start is None else slice_memory(self._memory, start, size_bytes)

    def keep(
        self, key: ChunkKey, memory: Memory, size_bytes: int, *, is_whole: bool = True
    ) -> None:
        """Turn reserved memory into the object `key`; an older one of that key makes way."""
        with self._lock:
            older = self._kept.pop(key, None)
            if older is not None:
                self._give_back(older.memory)
            self._kept[key] = _HostObject(memory, size_bytes, is_whole)

    def complete(self, key: ChunkKey) -> None:
        """Mark an object whole once what it lacked was filled in. Harmless after `close`, which
        waits for no load."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept[key] = kept._replace(is_whole=True)

    def is_whole(self, key: ChunkKey) -> bool:
        """Whether an object is here with all its extras."""
        kept = self._kept.get(key)
        return kept is not None and kept.is_whole

    def cancel(self, memory: Memory) -> None:
        """Give reserved memory back unused."""
        with self._lock:
            self._give_back(memory)

    def _copy_out(self, key: ChunkKey, kept: _HostObject, offset: int, out: memoryview) -> None:
        with self._lock:
            if self._kept.get(key) is not kept:
                raise TierError(f"{key.hex()[:16]}… left the host tier while it was read")
            out[:] = kept.memory.view[offset : offset + len(out)]

    def _give_back(self, memory: Memory) -> None:
        assert memory.start is not None, "not from this arena"
        self._arena.give_back(memory.start)


def _take(size_bytes: int, *, pinned: bool) -> Memory:
    try:
        return new_memory(size_bytes, pinned=pinned)
    except OSError as error:  # more than the system will ever promise
        raise TierError(
            f"cannot take {size_bytes / (1 << 30):,.1f} GiB of host memory: {error.strerror}; "
            "give the host tier less"
        ) from error
