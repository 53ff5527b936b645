"""A chunk with extras in a tier that is watched: which bytes were read, and when."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvweave.kv.format.header import ALIGN, Buffer
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.store import KVStore
from kvweave.kv.tier_slot import OpenTier
from kvweave.kv.tiers import Reader, Tier, open_tier
from kvweave.kv.tiers.config import StoreConfig
from worlds.kv import (
    CHUNK_BYTES,
    LAYERS,
    is_layer_of,
    make_chunk,
    make_config,
    make_key,
    read_extras,
)

EXTRAS = {"chunk": b"id", "anchors": b"a" * 9000, "inter": b"i" * 100, "rest": b"r" * 50_000}
CHUNK = make_chunk(0, extras=EXTRAS)
HEADER = CHUNK.header
KEY = make_key(0)
# of this little object: a page per layer, and one that says whose text it is
PLAIN_BYTES = HEADER.header_bytes + ALIGN + LAYERS * ALIGN
UNREAD = set(EXTRAS) - {"chunk"}  # by a load that asks for nothing


class Counter:
    """A tier that notes which bytes were read, and can hold reads up."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.reads: list[tuple[int, int]] = []
        self.readers: list[CountingReader] = []  # one per object opened
        self.writes_at_once = 1
        self.best_read_bytes = 1  # one layer, one read
        self.go_on = threading.Event()
        self.go_on.set()
        self.hold_from = 0  # reads at or behind this byte wait for `go_on`

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def open(self, key: ChunkKey) -> "CountingReader | None":
        reader = self.inner.open(key)
        if reader is None:
            return None
        self.readers.append(CountingReader(reader, self))
        return self.readers[-1]

    def write(self, key: ChunkKey, parts: Sequence[Buffer]) -> bool:
        return self.inner.write(key, parts)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.reads)


class CountingReader:
    def __init__(self, inner: Reader, counter: Counter) -> None:
        self.size_bytes = inner.size_bytes
        self._inner = inner
        self._counter = counter

    def read(self, offset: int, out: memoryview) -> None:
        if offset >= self._counter.hold_from:
            assert self._counter.go_on.wait(10)
        self._inner.read(offset, out)
        self._counter.reads.append((offset, len(out)))

    def close(self) -> None:
        self._inner.close()


class World:
    """A store whose tier below host memory is watched and holds chunk 0, with its extras."""

    def __init__(self, cfg: StoreConfig, host: OpenTier | None) -> None:
        self.below = Counter(open_tier(cfg.tiers[-1]))
        capacity = None if self.below.inner.remote else 1 << 30
        below = OpenTier(self.below, capacity)  # type: ignore[arg-type]
        with KVStore(cfg, tiers=[below]) as store:
            assert store.save(CHUNK, wait_s=5).wait(5)
        self.store = KVStore(cfg, tiers=[below] if host is None else [host, below])

    def load(self, *extras: str) -> dict[str, bytes]:
        """Load as a request does; returns the extras that came."""
        self.below.reads.clear()
        with self.store.acquire([KEY]) as lease:
            transfer = self.store.load(lease, extras=extras)
            for layer in range(LAYERS):
                assert is_layer_of(0, layer, transfer.wait_layer(layer)[KEY])
            found = {name: read_extras(transfer, name).get(KEY, b"") for name in extras}
        wait_until(lambda: self.store.num_pinned() == 0)
        return found

    def entry_lacks(self) -> set[str]:
        host = self.store.inventory.host
        assert host is not None
        entry = host.budget.find(KEY)
        assert entry is not None
        assert host.tier.is_whole(KEY) == (not entry.lacks)
        return set(entry.lacks)


def on_disk(root: Path, host_chunks: int | None = None) -> World:
    cfg = make_config(root, host_chunks=host_chunks, io_threads=4)
    if host_chunks is None:
        return World(cfg, None)
    return World(cfg, OpenTier(open_tier(cfg.tiers[0]), host_chunks * CHUNK_BYTES))


def wait_for(store: KVStore, counter: str) -> None:
    wait_until(lambda: store.metrics.value(counter) > 0)


def wait_until(is_so: Callable[[], bool]) -> None:
    """A request goes on before an IO thread is through with the last of its work."""
    give_up_s = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < give_up_s, "it never was"
        time.sleep(0.001)


def damage(root: Path, offset: int) -> None:
    (path,) = (root / "objects").rglob("*.kv")
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)
