"""Where the layers of one chunk come from, as a transfer sees it."""

from collections.abc import Collection, Iterable
from typing import Protocol

from torch import Tensor

from kvweave.kv.awaited import Patience
from kvweave.kv.format.header import Header
from kvweave.kv.format.objects import EncodedLayer, extra_of, extra_tensor, layer_of, layers_of
from kvweave.kv.memory import Memory
from kvweave.kv.residency import Miss
from kvweave.kv.tier_budget import TierEntry


class Source(Protocol):
    """An arrival, or bytes already in host memory."""

    @property
    def failure(self) -> Miss | None: ...

    def want(self, layers: Iterable[int]) -> None: ...

    def want_first(self, layers: Iterable[int]) -> None: ...

    def want_extras(self, names: Collection[str]) -> None: ...

    tier_name: str
    began_s: float  # when reading began and when the last layer came; both 0: nothing to read
    ended_s: float

    def is_ready(self, layer: int) -> bool: ...

    def wait_layer(self, layer: int, patience: Patience) -> EncodedLayer | None: ...

    def whole(self) -> Tensor | None: ...

    def has_extras(self, names: Collection[str]) -> bool: ...

    def lost_of(self, names: Collection[str]) -> Miss | None: ...

    def wait_extras(self, names: Collection[str], patience: Patience) -> Header | Miss: ...

    def named_extra(self, name: str) -> memoryview | None: ...

    def named_tensor(self, name: str) -> Tensor | None: ...


class Resident:
    """A chunk that is in the host tier: every layer is there at once, and so is every extra that
    the load asked for. What the entry lacks was not asked for."""

    failure: Miss | None = None
    tier_name = "host"
    began_s = ended_s = 0.0

    def __init__(self, entry: TierEntry) -> None:
        assert entry.header is not None
        assert entry.memory is not None
        self._header: Header = entry.header
        self._memory: Memory = entry.memory
        self._lacks = entry.lacks

    def want(self, layers: Iterable[int]) -> None:
        """Nothing to fetch."""

    def want_first(self, layers: Iterable[int]) -> None:
        """Nothing to fetch."""

    def want_extras(self, names: Collection[str]) -> None:
        """Nothing to fetch."""

    def is_ready(self, layer: int) -> bool:
        return True

    def wait_layer(self, layer: int, patience: Patience) -> EncodedLayer | None:
        if layer >= len(self._header.layers):
            return None
        return layer_of(self._header, self._memory, layer)

    def whole(self) -> Tensor | None:
        return layers_of(self._header, self._memory)

    def has_extras(self, names: Collection[str]) -> bool:
        return True

    def lost_of(self, names: Collection[str]) -> Miss | None:
        return None

    def wait_extras(self, names: Collection[str], patience: Patience) -> Header | Miss:
        return self._header

    def named_extra(self, name: str) -> memoryview | None:
        return None if name in self._lacks else extra_of(self._header, self._memory, name)

    def named_tensor(self, name: str) -> Tensor | None:
        return None if name in self._lacks else extra_tensor(self._header, self._memory, name)
