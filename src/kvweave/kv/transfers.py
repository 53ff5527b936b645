"""The transfer that brings the bytes of a lease, layer by layer, wherever each chunk comes from."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor

from kvweave.kv.awaited import Patience
from kvweave.kv.format.header import Header
from kvweave.kv.format.objects import EncodedLayer
from kvweave.kv.keys import ChunkKey
from kvweave.kv.leases import Lease as Lease
from kvweave.kv.provenance import PROVENANCE
from kvweave.kv.residency import Miss
from kvweave.kv.sources import Source


class Transfer:
    """Brings the layers of a lease's chunks into host memory, a bounded number ahead.

    Made by `KVStore.load`. Used by one thread, the one that consumes the layers. Views it gives out
    are read-only and valid until the lease is released.
    """

    def __init__(
        self,
        lease: Lease,
        sources: Mapping[ChunkKey, Source],
        budgets_s: Mapping[str, float],
        lookahead_layers: int,
        first_layers: Sequence[int] = (),
        extras: Collection[str] = (),
        lost: Mapping[ChunkKey, Miss] | None = None,
    ) -> None:
        """`budgets_s` is how long this request waits for each tier, all chunks together; `lost` are
        chunks of the lease that have no source."""
        self.lost: dict[ChunkKey, Miss] = dict(lost or {})  # failed on the way, and why
        self._lease = lease
        self._sources = dict(sources)
        self._patience = {tier: Patience(budget_s) for tier, budget_s in budgets_s.items()}
        self._lookahead = lookahead_layers
        self._first = frozenset(first_layers)
        self._extras = frozenset(extras)
        self._asked = 0  # layers [0, asked) were asked for
        for source in self._sources.values():
            source.want_extras(self._extras)
            source.want_first(first_layers)
        self._look_ahead(0)

    def is_ready(self, layer: int) -> bool:
        """Whether `wait_layer` would answer at once. Asks for nothing."""
        return all(
            key in self.lost or source.is_ready(layer) for key, source in self._sources.items()
        )

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
        elif layer not in self._first:  # out of order, and nobody said so before
            for _, source in self._alive():
                source.want_first([layer])
            self._look_ahead(layer)
        found: dict[ChunkKey, EncodedLayer] = {}
        for key, source in self._alive():
            encoded = source.wait_layer(layer, self._patience[source.tier_name])
            miss = source.failure if encoded is None else source.lost_of(self._extras)
            if encoded is not None and miss is None:
                found[key] = encoded
            else:
                self.lost[key] = miss or Miss.CORRUPT
        return found

    def whole(self, keys: Iterable[ChunkKey]) -> list[Tensor] | None:
        """All layers of these chunks, see `objects.layers_of`; None unless every one of them is in
        host memory. Never blocks. What is whole cannot be lost any more."""
        assert not self._lease.released, "the lease behind this transfer was released"
        found = []
        for key in keys:
            source = self._sources.get(key)
            if source is None or key in self.lost or source.lost_of(self._extras):
                return None
            data = source.whole()
            if data is None:
                return None
            found.append(data)
        return found

    def headers(self) -> dict[ChunkKey, Header]:
        """Shape, codec and number of layers of every chunk. Blocks until all are known."""
        return self._known(())

    def sizes(self) -> dict[ChunkKey, int]:
        """Bytes of every chunk as it is read: without extras that were not asked for. Blocks as
        `headers` does."""
        read = self._extras | PROVENANCE
        return {key: header.bytes_with(read) for key, header in self.headers().items()}

    def seconds(self) -> dict[str, float]:
        """How long each tier took, from the first read of it to the last layer so far. Host memory,
        where nothing had to be read, is left out."""
        spans: dict[str, tuple[float, float]] = {}
        for source in self._sources.values():
            if source.ended_s > source.began_s:
                began_s, ended_s = spans.get(source.tier_name, (source.began_s, 0.0))
                span = min(began_s, source.began_s), max(ended_s, source.ended_s)
                spans[source.tier_name] = span
        return {tier: ended_s - began_s for tier, (began_s, ended_s) in spans.items()}

    def has_extras(self) -> bool:
        """Whether `extras` would answer at once. Asks for nothing."""
        sources = self._sources.items()
        return all(key in self.lost or each.has_extras(self._extras) for key, each in sources)

    def wait_extras(self) -> Collection[ChunkKey]:
        """Block until the headers and the extras that were asked for are there, not for any layer.
        Returns the chunks that came; the others are in `lost`."""
        return self._known(self._extras)

    def extras(self, name: str) -> dict[ChunkKey, memoryview]:
        """What each chunk carries beside its layers under this name (see `pack_chunk`), checked.
        Blocks as `wait_extras` does. Chunks without it are left out. `load` was asked for it.
        """
        assert not self._lease.released, "the lease behind this transfer was released"
        assert name in self._extras, f"extra {name!r} was not asked for"
        found: dict[ChunkKey, memoryview] = {}
        for key in self.wait_extras():
            data = self._sources[key].named_extra(name)
            if data is not None:
                found[key] = data
        return found

    def extra_tensors(self, name: str) -> dict[ChunkKey, Tensor]:
        """As `extras`, as uint8 tensors over the same bytes: nobody writes to them."""
        assert not self._lease.released, "the lease behind this transfer was released"
        assert name in self._extras, f"extra {name!r} was not asked for"
        found = {key: self._sources[key].named_tensor(name) for key in self.wait_extras()}
        return {key: data for key, data in found.items() if data is not None}

    def _known(self, extras: Collection[str]) -> dict[ChunkKey, Header]:
        """The headers of all chunks that are not lost, once these extras are there too."""
        found: dict[ChunkKey, Header] = {}
        for key, source in self._alive():
            answer = source.wait_extras(extras, self._patience[source.tier_name])
            if isinstance(answer, Miss):
                self.lost[key] = answer
            else:
                found[key] = answer
        return found

    def _look_ahead(self, layer: int) -> None:
        """Ask for this layer and some behind it."""
        end = layer + 1 + self._lookahead
        if end > self._asked:
            for _, source in self._alive():
                source.want(range(self._asked, end))
            self._asked = end

    def _alive(self) -> list[tuple[ChunkKey, Source]]:
        """Whatever is not lost: of the rest nothing is asked for any more."""
        return [each for each in self._sources.items() if each[0] not in self.lost]
