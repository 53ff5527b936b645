"""Another tier with faults in front of it, to keep callers honest.

Each call draws from one seeded generator, so a single-threaded run can be repeated exactly.
`release()` ends every hang, now and later: a test that hangs a thread can let it go.
"""

import random
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvweave.errors import TierCorrupt, TierError
from kvweave.kv.format.header import Buffer, Reader
from kvweave.kv.format.keys import ChunkKey, ChunkTag
from kvweave.kv.tiers import open_tier
from kvweave.kv.tiers.base import StoredObject, Tier
from kvweave.kv.tiers.config import TierConfig


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What a faulty tier does, each with a probability per call. Seeded: a run can be repeated."""

    seed: int = 0
    drop: float = 0.0  # open and size say "not here", writes say "no room"
    fail: float = 0.0  # raise TierError
    truncate: float = 0.0  # a read ends early and says so
    corrupt: float = 0.0  # a read flips one bit and says nothing
    delay: float = 0.0  # sleep delay_s first
    delay_s: float = 0.01
    hang: float = 0.0  # sleep until released, as a dead server behind a dead firewall would


@dataclass(frozen=True, slots=True)
class FaultyTierConfig:
    """Another tier with faults put in front of it: for tests and drills."""

    kind: ClassVar[str] = "faulty"
    inner: TierConfig
    faults: FaultPlan = field(default_factory=FaultPlan)

    @property
    def capacity_bytes(self) -> int | None:
        return self.inner.capacity_bytes

    @property
    def place(self) -> str | None:
        return self.inner.place

    def open(self) -> "FaultyTier":
        return FaultyTier(open_tier(self.inner), self.faults)


class FaultyReader:
    """Reads through to the inner reader, sometimes late, short, wrong or never."""

    def __init__(self, inner: Reader, tier: "FaultyTier") -> None:
        self.size_bytes = inner.size_bytes
        self._inner = inner
        self._tier = tier

    def read(self, offset: int, out: memoryview) -> None:
        self._tier.stumble("read")
        if self._tier.strikes(self._tier.plan.truncate):
            half = len(out) // 2
            self._inner.read(offset, out[:half])
            raise TierCorrupt(f"read ended after {half} of {len(out)} bytes (injected)")
        self._inner.read(offset, out)
        if len(out) and self._tier.strikes(self._tier.plan.corrupt):
            at = self._tier.draw(len(out))
            out[at] ^= 1 << self._tier.draw(8)

    def close(self) -> None:
        self._inner.close()


class FaultyTier:
    """Keeps the contract of a tier on a bad day: every answer it gives is an allowed one, except
    that `corrupt` reads lie, which is what checksums are for."""

    def __init__(self, inner: Tier, plan: FaultPlan) -> None:
        self.plan = plan  # tests swap it: faults can begin and end while the tier is in use
        self.name = f"faulty {inner.name}"
        self.place = inner.place
        self.durable = inner.durable
        self.remote = inner.remote
        self.writes_at_once = 1
        self.best_read_bytes = inner.best_read_bytes
        self._inner = inner
        self._lock = threading.Lock()
        self._random = random.Random(plan.seed)
        self._released = threading.Event()

    def release(self) -> None:
        """End every hang."""
        self._released.set()

    def size(self, key: ChunkKey) -> int | None:
        self.stumble("size")
        return None if self.strikes(self.plan.drop) else self._inner.size(key)

    def open(self, key: ChunkKey) -> FaultyReader | None:
        self.stumble("open")
        inner = None if self.strikes(self.plan.drop) else self._inner.open(key)
        return None if inner is None else FaultyReader(inner, self)

    def write(self, key: ChunkKey, parts: Sequence[Buffer]) -> bool:
        self.stumble("write")
        return not self.strikes(self.plan.drop) and self._inner.write(key, parts)

    def delete(self, key: ChunkKey) -> bool:
        self.stumble("delete")
        return self._inner.delete(key)

    def quarantine(self, key: ChunkKey) -> bool:
        self.stumble("quarantine")
        return self._inner.quarantine(key)

    def scan(self) -> Iterator[StoredObject]:
        self.stumble("scan")
        yield from self._inner.scan()

    def tagged_keys(self, tags: Collection[ChunkTag]) -> list[ChunkKey]:
        self.stumble("tagged")
        return self._inner.tagged_keys(tags)

    def check(self) -> None:
        self.stumble("check")
        self._inner.check()

    def close(self) -> None:
        self.release()
        self._inner.close()

    def stumble(self, verb: str) -> None:
        """The faults that can hit any call: late, never, broken."""
        if self.strikes(self.plan.delay):
            self._released.wait(self.plan.delay_s)
        if self.strikes(self.plan.hang):
            self._released.wait()
            raise TierError(f"{verb} hung until it was released (injected)")
        if self.strikes(self.plan.fail):
            raise TierError(f"{verb} failed (injected)")

    def strikes(self, probability: float) -> bool:
        """Whether a fault of this probability happens now. Tests replace it to say when."""
        if probability <= 0:
            return False
        with self._lock:
            return self._random.random() < probability

    def draw(self, below: int) -> int:
        with self._lock:
            return self._random.randrange(below)
