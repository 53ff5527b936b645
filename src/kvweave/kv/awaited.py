"""An object on its way, seen by those who wait: what is there, what failed, how long to wait.

Ten requests for one chunk wait on the same one. Layers that were shown stay valid whatever comes
later; a failure is set once, with a reason, and wakes everybody. An extra may be lost by itself.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvweave.kv.format.header import Header
from kvweave.kv.format.objects import EncodedLayer, extra_of, extra_tensor, layer_of, layers_of
from kvweave.kv.memory import Memory
from kvweave.kv.read_plan import ReadSpan
from kvweave.kv.residency import Miss


@dataclass(frozen=True, slots=True)
class Landing:
    """Where an arrival's bytes go, chosen by the store when the size is known."""

    memory: Memory
    stays: bool  # in the host tier once complete; otherwise staging memory
    whole: bool = False  # read all extras, asked for or not


class Patience:
    """What one request may still wait for one tier. Belongs to the thread that waits."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self.left_s = budget_s


class Awaited(ABC):
    """Thread-safe. Who brings the bytes (`arrivals.py`) calls `_open_up`, `_show` and `_fail`."""

    def __init__(self, tier_name: str, deadline_s: float) -> None:
        self.tier_name = tier_name
        self.header: Header | None = None
        self.landing: Landing | None = None
        self.held: frozenset[str] = frozenset()  # extras that are in memory and checked
        self.began_s = self.ended_s = 0.0  # first read asked for, last layer shown
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._failure: Miss | None = None
        self._lost: dict[str, Miss] = {}  # extras that will not come, though the layers may
        self._ready: list[bool] = []
        self._awaited: list[int] = []  # layers that some thread waits for, one each

    @abstractmethod
    def _stalled_s(self) -> float:
        """For how long nothing has moved, here or in front of us. The lock is held."""

    @abstractmethod
    def _on_failure(self, miss: Miss, detail: str) -> None:
        """Called once, on the thread that found out, with no lock held."""

    @property
    def failure(self) -> Miss | None:
        return self._failure

    def wait_layer(self, layer: int, patience: Patience) -> EncodedLayer | None:
        """Block until a layer is there, whatever else is. None: it will not come, see `failure`; if
        that is None as well, the object has no such layer.

        Waits while reads of this object, or those queued before them, get on within `deadline_s`,
        and no longer than `patience` lasts, which the wait uses up.
        """
        while True:
            # without the lock: entries only ever turn True, and readers must not slow each other
            if layer < len(self._ready) and self._ready[layer]:  # outlives a later failure
                assert self.header is not None
                assert self.landing is not None
                return layer_of(self.header, self.landing.memory, layer)
            with self._changed:
                if layer < len(self._ready) and self._ready[layer]:
                    continue
                if self._failure is not None or (self.header and layer >= len(self._ready)):
                    return None
                self._awaited.append(layer)
                try:
                    if self._wait_some(patience):
                        continue
                finally:
                    self._awaited.remove(layer)
            self._fail_slow(patience)

    def is_ready(self, layer: int) -> bool:
        """Whether `wait_layer` would return at once, with the layer or without."""
        ready = self._ready  # entries only ever turn True; the list is replaced once, when empty
        if layer < len(ready):
            return self._failure is not None or ready[layer]
        return self._failure is not None or bool(ready)  # open, and has no such layer

    def whole(self) -> Tensor | None:
        """All layers, see `layers_of`; None while some are not there."""
        ready = self._ready
        if not ready or not all(ready):
            return None
        assert self.header is not None
        assert self.landing is not None
        return layers_of(self.header, self.landing.memory)

    def named_extra(self, name: str) -> memoryview | None:
        """A named extra, checked and read-only; None if it is not there, or not there yet."""
        if name not in self.held:
            return None
        assert self.header is not None
        assert self.landing is not None
        return extra_of(self.header, self.landing.memory, name)

    def named_tensor(self, name: str) -> Tensor | None:
        """As `named_extra`, to copy from."""
        if name not in self.held:
            return None
        assert self.header is not None
        assert self.landing is not None
        return extra_tensor(self.header, self.landing.memory, name)

    def has_extras(self, names: Collection[str]) -> bool:
        """Whether `wait_extras` would return at once, with them or without."""
        return self._answer(names) is not None

    def lost_of(self, names: Collection[str]) -> Miss | None:
        """Why one of these extras will not come, as far as that is known. Never blocks."""
        if not self._lost:  # asked for every layer, and hardly ever so
            return None
        return next((self._lost[name] for name in names if name in self._lost), None)

    def wait_extras(self, names: Collection[str], patience: Patience) -> Header | Miss:
        """Block until the header and those of these extras that the object has are there; they were
        asked for. A Miss: why they will not come."""
        while True:
            with self._changed:
                answer = self._answer(names)
                if answer is not None:
                    return answer
                if self._wait_some(patience):
                    continue
            self._fail_slow(patience)

    def _answer(self, names: Collection[str]) -> Header | Miss | None:
        """What `wait_extras` returns, None while it would wait."""
        header, held = self.header, self.held  # `held` only ever grows
        if header is None:
            return self._failure
        awaited = [name for name in names if name in header.extras and name not in held]
        if not awaited:  # which outlives a later failure
            return header
        return self.lost_of(awaited) or self._failure

    def _wait_some(self, patience: Patience) -> bool:
        """Wait a moment for a change. False: long enough. The caller holds the lock."""
        now_s = time.monotonic()
        left_s = min(self._deadline_s - self._stalled_s(), patience.left_s)
        if left_s <= 0:
            return False
        self._changed.wait(min(left_s, 0.5))
        patience.left_s -= time.monotonic() - now_s
        return True

    def _fail_slow(self, patience: Patience) -> None:
        what = (
            f"its bytes drip: {patience.budget_s:g} s were not enough"
            if patience.left_s <= 0
            else f"nothing came for {self._deadline_s:g} s"
        )
        self._fail(Miss.TOO_SLOW, f"{what}; check the device")

    def _open_up(self, header: Header) -> None:
        """The header is known and `landing` is set. The lock is held."""
        self.header = header
        self._ready = [False] * len(header.layers)
        self._changed.notify_all()

    def _lose(self, names: Mapping[str, Miss]) -> None:
        """These extras will not come. The lock is held."""
        self._lost |= names
        self._changed.notify_all()

    def _show(self, span: ReadSpan) -> None:
        """These layers are in memory and checked. The lock is held."""
        self._ready[span.first : span.end] = [True] * (span.end - span.first)
        self.ended_s = time.monotonic()
        # who waits for another layer would only take a core from the readers to find that out
        if any(span.first <= layer < span.end for layer in self._awaited):
            self._changed.notify_all()

    def _fail(self, miss: Miss, detail: str) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = miss
            self._changed.notify_all()
        self._on_failure(miss, detail)
