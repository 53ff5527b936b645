"""An object on its way to host memory, or there already: what of it is there, what failed, how
long to wait.

Ten requests for one chunk wait on the same arrival. Layers that were shown stay valid whatever
comes later; a failure is set once, with a reason, and wakes every thread that waits. An extra may
be lost by itself. `arrival_reads.py` brings the bytes.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvweave.kv.format.header import Header
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.memory import Memory
from kvweave.kv.format.objects import EncodedLayer, extra_tensor, layer_of, layers_of
from kvweave.kv.tier_slot import TierEntry
from kvweave.reasons import Reason


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


class ArrivalOwner(Protocol):
    """What the store does for an arrival. Called with no lock held, on IO threads; `report_failure`
    also on a thread that waited for too long."""

    def land(self, arrival: "Arrival", header: Header) -> Landing:
        """Return memory for an object with this header."""
        ...

    def refuses(self, arrival: "Arrival", header: Header, memory: Memory) -> bool:
        """Whether the object may not be read, now that its provenance is known. May block."""
        ...

    def complete(self, arrival: "Arrival") -> None:
        """Every layer is there and checked."""
        ...

    def fill(self, arrival: "Arrival", name: str, data: memoryview) -> None:
        """Put an extra that came late, checked and with its padding, into memory."""
        ...

    def report_failure(self, arrival: "Arrival", miss: Reason, detail: str) -> None:
        """Report that the object, or one of its extras, will not come; `detail` says why."""
        ...

    def idle(self, arrival: "Arrival") -> bool:
        """No IO thread touches it, for now or for good. True: for good, its memory went back."""
        ...


@dataclass(slots=True)
class LoadRecord:
    """What the store notes of an arrival. Read and changed under the store's lock alone."""

    source: TierEntry | None = None  # what it is read from
    kept: TierEntry | None = None  # the object of the host tier that it became, or completes
    users: int = 0  # leases that hold it
    damaged: bool = False  # what it is read from must go,
    put_aside: bool = False  # and is gone
    disposed: bool = False  # its memory was given back


class Arrival:
    """The state of one object on its way, as the threads see it that wait for it.

    Thread-safe. `changed` is its lock, which `ArrivalReads` shares: methods that say so expect it
    to be held. `record` is under the store's lock.
    """

    def __init__(
        self,
        key: ChunkKey,
        tier_name: str,
        deadline_s: float,
        queue_stalled_s: Callable[[], float],
        owner: ArrivalOwner,
    ) -> None:
        """Without any progress for `deadline_s` it will not come. `queue_stalled_s` says for how
        long nothing has moved in front of the reads of this object."""
        self.key = key
        self.tier_name = tier_name
        self.owner = owner
        self.record = LoadRecord()
        self.changed = threading.Condition()
        self.header: Header | None = None
        self.landing: Landing | None = None
        self.held: frozenset[str] = frozenset()  # extras that are in memory and checked
        self.front: frozenset[str] = frozenset()  # those of them that came before the layers
        self.began_s = self.ended_s = 0.0  # first read asked for, last layer shown
        self._deadline_s = deadline_s
        self._queue_stalled_s = queue_stalled_s
        self._num_active = 0  # reads that a thread has begun
        self._progress_s = 0.0  # when one of them last began or finished
        self._failure: Reason | None = None
        self._lost: dict[str, Reason] = {}  # extras that will not come, though the layers may
        self._ready: list[bool] = []
        self._awaited: list[int] = []  # layers that some thread waits for, one each

    def header_and_landing(self) -> tuple[Header, Landing]:
        """Header and memory of an arrival that is open."""
        assert self.header is not None
        assert self.landing is not None
        return self.header, self.landing

    # ---- for threads that wait

    @property
    def failure(self) -> Reason | None:
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
                header, landing = self.header_and_landing()
                return layer_of(header, landing.memory, layer)
            with self.changed:
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
        header, landing = self.header_and_landing()
        return layers_of(header, landing.memory)

    def named_extra(self, name: str) -> Tensor | None:
        """A named extra as a tensor to copy from; None if it is not there, or not there yet."""
        if name not in self.held:
            return None
        header, landing = self.header_and_landing()
        return extra_tensor(header, landing.memory, name)

    def has_extras(self, names: Collection[str]) -> bool:
        """Whether `wait_extras` would return at once, with them or without."""
        return self._answer(names) is not None

    def lost_of(self, names: Collection[str]) -> Reason | None:
        """Why one of these extras will not come, as far as that is known. Never blocks."""
        if not self._lost:  # asked for every layer, and hardly ever so
            return None
        return next((self._lost[name] for name in names if name in self._lost), None)

    def wait_extras(self, names: Collection[str], patience: Patience) -> Header | Reason:
        """Block until the header and those of these extras that the object has are there; they were
        asked for. A Reason: why they will not come."""
        while True:
            with self.changed:
                answer = self._answer(names)
                if answer is not None:
                    return answer
                if self._wait_some(patience):
                    continue
            self._fail_slow(patience)

    def _answer(self, names: Collection[str]) -> Header | Reason | None:
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
        self.changed.wait(min(left_s, 0.5))
        patience.left_s -= time.monotonic() - now_s
        return True

    def _fail_slow(self, patience: Patience) -> None:
        what = (
            f"its bytes drip: {patience.budget_s:g} s were not enough"
            if patience.left_s <= 0
            else f"nothing came for {self._deadline_s:g} s"
        )
        self.fail(Reason.TOO_SLOW, f"{what}; check the device")

    def _stalled_s(self) -> float:
        """Since a read of this object began or finished; of those queued before it if none did. The
        lock is held."""
        if self._num_active:
            return time.monotonic() - self._progress_s
        return self._queue_stalled_s()

    # ---- for `ArrivalReads`

    def open_up(self, header: Header, *, is_complete: bool = False) -> None:
        """The header is known, and `landing` and `held` are set. `is_complete`: every layer is
        there from the start. The lock is held."""
        self.header = header
        self._ready = [is_complete] * len(header.layers)
        self.changed.notify_all()

    def read_began(self) -> None:
        """The lock is held."""
        self._num_active += 1
        self._progress_s = time.monotonic()

    def read_ended(self) -> None:
        """The lock is held."""
        self._num_active -= 1
        self._progress_s = time.monotonic()

    def show(self, first: int, end: int) -> None:
        """Show that layers [first, end) are in memory and checked. The lock is held."""
        self._ready[first:end] = [True] * (end - first)
        self.ended_s = self._progress_s = time.monotonic()
        # a thread that waits for another layer would only take a core from the readers to find out
        if any(first <= layer < end for layer in self._awaited):
            self.changed.notify_all()

    def show_extra(self) -> None:
        """Show that `held` has one more extra. The lock is held."""
        self.ended_s = self._progress_s = time.monotonic()
        self.changed.notify_all()

    def lose(self, names: Mapping[str, Reason]) -> None:
        """Record that these extras will not come. The lock is held."""
        self._lost |= names
        self.changed.notify_all()

    def fail(self, miss: Reason, detail: str) -> None:
        """Nothing more will come. The first reason stands, and the owner hears of that one."""
        with self.changed:
            if self._failure is not None:
                return
            self._failure = miss
            self.changed.notify_all()
        self.owner.report_failure(self, miss, detail)

    def bytes_left(self, extras: Collection[str]) -> int:
        """What is still to come with these extras, as the header says. The lock is held."""
        if self._failure is not None or self.header is None:
            return 0
        layers = zip(self.header.layers, self._ready, strict=True)
        left = [section for section, is_here in layers if not is_here]
        awaited = set(extras) - self.held - self._lost.keys()
        left += [section for name, section in self.header.extras.items() if name in awaited]
        return sum(section.size_bytes for section in left)
