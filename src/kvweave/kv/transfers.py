"""What a request has of the store: a lease, which keeps chunk KV from going away, and the transfer
that brings its bytes layer by layer, wherever each chunk comes from.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

from torch import Tensor

from kvweave.kv.arrival import Arrival, Patience
from kvweave.kv.arrival_reads import ArrivalReads
from kvweave.kv.format.header import Header
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import EncodedLayer
from kvweave.kv.provenance import PROVENANCE
from kvweave.kv.tier_slot import TierEntry, TierSlot
from kvweave.reasons import Reason


class Pin(NamedTuple):
    slot: TierSlot
    entry: TierEntry


class Holds(NamedTuple):
    """What a lease keeps from going away. Changed by the store alone, under its lock."""

    pins: dict[ChunkKey, Pin]
    loads: list[ArrivalReads]
    late_pins: list[tuple[ChunkKey, Pin]]  # chunks that reached the host tier after `acquire`


class Lease:
    """A pin on chunk KV. Made by `KVStore.acquire`, belongs to one request, releases itself.

    While it is held the bytes behind it stay where they are; after `release` no view that came
    through it may be touched. Releasing twice is harmless. Not thread-safe: one request, one owner.
    """

    def __init__(
        self,
        tiers: Mapping[ChunkKey, str],
        missing: Mapping[ChunkKey, Reason],
        holds: Holds,
        release: Callable[[Holds], None],
        abandon: Callable[[Holds], None],
    ) -> None:
        self.tiers = dict(tiers)  # chunk → tier it will come from, in the order asked for
        self.missing = dict(missing)  # chunk → why it is not in the lease
        self.holds = holds  # the store's
        self.released = False
        self._release = release
        self._abandon = abandon  # like release, but safe inside a garbage collection

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """What is held, each once, in the order asked for."""
        return tuple(self.tiers)

    def release(self) -> None:
        if not self.released:
            self.released = True
            self._release(self.holds)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if not self.released:
            self.released = True
            self._abandon(self.holds)


class Sources(NamedTuple):
    """Where the chunks of one lease come from."""

    chunks: dict[ChunkKey, Arrival]
    reads: dict[ChunkKey, ArrivalReads]  # what brings those that are on their way
    lost: dict[ChunkKey, Reason]  # chunks of the lease that cannot be had


class Transfer:
    """Brings the layers of a lease's chunks into host memory, a bounded number ahead.

    Made by `KVStore.load`. Used by one thread, the one that consumes the layers. Views it gives out
    are read-only and valid until the lease is released.
    """

    def __init__(
        self,
        lease: Lease,
        sources: Sources,
        patience_s: Mapping[str, float],
        lookahead_layers: int,
        first_layers: Sequence[int] = (),
        extras: Collection[str] = (),
    ) -> None:
        """`patience_s` is how long this request waits for each tier, all chunks together."""
        self.lost: dict[ChunkKey, Reason] = sources.lost  # failed on the way, and why
        self._lease = lease
        self._chunks = sources.chunks
        self._reads = sources.reads
        self._patience = {tier: Patience(budget_s) for tier, budget_s in patience_s.items()}
        self._lookahead = lookahead_layers
        self._first = frozenset(first_layers)
        self._extras = frozenset(extras)
        self._asked = 0  # layers [0, asked) were asked for
        for reads in self._reads.values():
            reads.want_extras(self._extras)
            reads.want_first(first_layers)
        self._look_ahead(0)

    def is_ready(self, layer: int) -> bool:
        """Whether `wait_layer` would answer at once. Asks for nothing."""
        return all(key in self.lost or chunk.is_ready(layer) for key, chunk in self._chunks.items())

    def wait_layer(self, layer: int) -> dict[ChunkKey, EncodedLayer]:
        """Layer `layer` of every chunk of the lease, in its order. Blocks until all are there,
        whichever others are.

        A chunk that failed is left out, here and from now on, and named in `lost`: the request
        computes it instead. So is one that lost an extra which was asked for, and one that has no
        such layer, which is then not of the model it was asked for. Layers of it that were given
        out before stay readable.
        """
        assert not self._lease.released, "the lease behind this transfer was released"
        assert layer >= 0, "layers count from 0"
        if layer < self._asked:
            self._look_ahead(layer)
        elif layer not in self._first:  # out of order, and `load` was not told so
            for reads in self._reads_alive():
                reads.want_first([layer])
            self._look_ahead(layer)
        found: dict[ChunkKey, EncodedLayer] = {}
        for key, chunk in self._alive():
            encoded = chunk.wait_layer(layer, self._patience[chunk.tier_name])
            miss = chunk.failure if encoded is None else chunk.lost_of(self._extras)
            if encoded is not None and miss is None:
                found[key] = encoded
            else:
                self.lost[key] = miss or Reason.CORRUPT
        return found

    def whole(self, keys: Iterable[ChunkKey]) -> list[Tensor] | None:
        """All layers of these chunks, see `objects.layers_of`; None unless every one of them is in
        host memory. Never blocks. What is whole cannot be lost any more."""
        assert not self._lease.released, "the lease behind this transfer was released"
        found = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None or key in self.lost or chunk.lost_of(self._extras):
                return None
            data = chunk.whole()
            if data is None:
                return None
            found.append(data)
        return found

    def headers(self) -> dict[ChunkKey, Header]:
        """Shape, codec and number of layers of every chunk. Blocks until all are known."""
        return self._wait_headers(())

    def sizes(self) -> dict[ChunkKey, int]:
        """Bytes of every chunk as it is read: without extras that were not asked for. Blocks as
        `headers` does."""
        read = self._extras | PROVENANCE
        return {key: header.bytes_with(read) for key, header in self.headers().items()}

    def seconds(self) -> dict[str, float]:
        """How long each tier took, from the first read of it to the last layer so far. Host memory,
        where nothing had to be read, is left out."""
        spans: dict[str, tuple[float, float]] = {}
        for chunk in self._chunks.values():
            if chunk.ended_s > chunk.began_s:
                began_s, ended_s = spans.get(chunk.tier_name, (chunk.began_s, 0.0))
                span = min(began_s, chunk.began_s), max(ended_s, chunk.ended_s)
                spans[chunk.tier_name] = span
        return {tier: ended_s - began_s for tier, (began_s, ended_s) in spans.items()}

    def has_extras(self) -> bool:
        """Whether `extras` would answer at once. Asks for nothing."""
        chunks = self._chunks.items()
        return all(key in self.lost or each.has_extras(self._extras) for key, each in chunks)

    def wait_extras(self) -> Collection[ChunkKey]:
        """Block until the headers and the extras that were asked for are there, not for any layer.
        Returns the chunks that came; the others are in `lost`."""
        return self._wait_headers(self._extras)

    def extras(self, name: str) -> dict[ChunkKey, Tensor]:
        """What each chunk carries beside its layers under this name (see `pack_chunk`), checked, as
        uint8 tensors that are read-only by promise. Blocks as `wait_extras` does. Chunks without it
        are left out. `load` was asked for it.
        """
        assert not self._lease.released, "the lease behind this transfer was released"
        assert name in self._extras, f"extra {name!r} was not asked for"
        found = {key: self._chunks[key].named_extra(name) for key in self.wait_extras()}
        return {key: data for key, data in found.items() if data is not None}

    def _wait_headers(self, extras: Collection[str]) -> dict[ChunkKey, Header]:
        """Wait for these extras; return the headers of all chunks that are not lost."""
        found: dict[ChunkKey, Header] = {}
        for key, chunk in self._alive():
            answer = chunk.wait_extras(extras, self._patience[chunk.tier_name])
            if isinstance(answer, Reason):
                self.lost[key] = answer
            else:
                found[key] = answer
        return found

    def _look_ahead(self, layer: int) -> None:
        """Ask for this layer and some of those after it."""
        end = layer + 1 + self._lookahead
        if end > self._asked:
            for reads in self._reads_alive():
                reads.want(range(self._asked, end))
            self._asked = end

    def _alive(self) -> list[tuple[ChunkKey, Arrival]]:
        """The chunks that are not lost: of the others nothing is asked for any more."""
        return [each for each in self._chunks.items() if each[0] not in self.lost]

    def _reads_alive(self) -> list[ArrivalReads]:
        return [reads for key, reads in self._reads.items() if key not in self.lost]


class ActiveLoads:
    """What is on its way to host memory: one arrival per chunk that others may join, and which of
    them leave a copy there. Plain bookkeeping: the inventory's lock is held in every call."""

    def __init__(self) -> None:
        self._joinable: dict[ChunkKey, ArrivalReads] = {}
        self._keepable: set[Arrival] = set()  # the chunk was not deleted since they began

    def get(self, key: ChunkKey) -> ArrivalReads | None:
        """Return the arrival of a chunk that others may join."""
        return self._joinable.get(key)

    def add(self, reads: ArrivalReads, *, is_kept: bool) -> None:
        """Others may join it; `is_kept`: what it brings may stay in host memory."""
        self._joinable[reads.arrival.key] = reads
        if is_kept:
            self._keepable.add(reads.arrival)

    def shut(self, arrival: Arrival) -> None:
        """No other load joins it any more: the next request looks afresh."""
        reads = self._joinable.get(arrival.key)
        if reads is not None and reads.arrival is arrival:
            del self._joinable[arrival.key]

    def keeps(self, arrival: Arrival) -> bool:
        return arrival in self._keepable

    def end(self, arrival: Arrival) -> None:
        """Forget an arrival whose memory goes."""
        self._keepable.discard(arrival)

    def disown(self, key: ChunkKey) -> None:
        """A chunk is deleted: what is under way serves its leases and is not kept."""
        self._joinable.pop(key, None)
        self._keepable = {a for a in self._keepable if a.key != key}

    def disown_all(self) -> None:
        """Keep nothing of what is under way: any of these chunks may be the deleted one."""
        self._joinable.clear()
        self._keepable.clear()

    def tier_of(self, key: ChunkKey) -> str | None:
        """Where a chunk that is on its way comes from."""
        reads = self._joinable.get(key)
        return None if reads is None else reads.arrival.tier_name

    def pending_bytes(self) -> dict[str, int]:
        """Bytes on their way to host memory, by the tier they come from."""
        pending: dict[str, int] = {}
        for reads in self._joinable.values():
            name = reads.arrival.tier_name
            pending[name] = pending.get(name, 0) + reads.bytes_left()
        return pending
