"""How fast is a tier that nothing came from yet? One chunk is loaded to find out.

A probe runs on a thread of its own and ends by the store's own deadlines, so a hung tier holds up
no request: planning waits a moment for a tier that was never met and otherwise goes on without it.
A probe that failed is remembered, and each failure doubles the time until the next one.
"""

import threading
import time
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field

from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.lookup import Peek
from kvweave.kv.store import KVStore
from kvweave.kv.tree.node import DEVICE, HOST
from kvweave.plan.loading_cost import PaidShares
from kvweave.plan.profile import TierLink, link_name

WAIT_S = 0.25  # a plan waits for tiers it meets for the first time, all together
STALE_S = 3600.0  # a tier that nothing came from for this long is measured again
FIRST_REST_S, LONGEST_REST_S = 5.0, 600.0  # after a failure, and after many


@dataclass(slots=True)
class _Probe:
    """A load under way. Written by its thread until `done` is set, then read by the owner."""

    link: TierLink | None = None  # None: it failed
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Rest:
    """A tier that failed: left alone until then."""

    until_s: float
    length_s: float


class TierProbes:
    """Keeps `links` known. For one thread at a time: `AutoPlanner` holds its lock."""

    def __init__(
        self,
        store: KVStore,
        num_layers: int,
        codec: str,
        links: MutableMapping[str, TierLink],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._num_layers = num_layers
        self._codec = codec
        self._links = links
        self._now_s = now_s
        self._running: dict[str, _Probe] = {}
        self._resting: dict[str, _Rest] = {}

    def meet(self, found: Iterable[tuple[ChunkKey, Peek]]) -> None:
        """See to it that the tiers these chunks lie in are known, now or before long.

        A tier known for long is measured again behind the caller's back: one that was too slow is
        left alone by every plan and would never be found to have recovered.
        """
        self._collect()
        unknown: list[_Probe] = []
        for key, peek in found:
            tier = peek.tier
            if tier in (None, HOST, DEVICE) or self._is_fresh(tier) or self._rests(tier):
                continue
            if tier not in self._running:
                self._running[tier] = self._start(key, tier)
            if self._link(tier) is None:
                unknown.append(self._running[tier])
        give_up_s = time.monotonic() + WAIT_S
        for probe in unknown:
            probe.done.wait(max(0.0, give_up_s - time.monotonic()))
        self._collect()

    def came(self, tier: str, size_bytes: int, seconds: float) -> None:
        """A request's own bytes came: that is a measurement too."""
        link = self._links.get(link_name(tier, self._codec))
        if link is not None and size_bytes:
            link.observe(size_bytes, seconds)
            link.seen_s = self._now_s()

    def _start(self, key: ChunkKey, tier: str) -> _Probe:
        probe = _Probe()

        def load() -> None:
            try:
                probe.link = self._load(key, tier)
            finally:
                probe.done.set()

        threading.Thread(target=load, name=f"probe-{tier}", daemon=True).start()
        return probe

    def _load(self, key: ChunkKey, tier: str) -> TierLink | None:
        with self._store.acquire([key]) as lease:
            transfer = self._store.load(lease)
            for layer in range(self._num_layers):
                transfer.wait_layer(layer)
            sizes = list(transfer.sizes().values())
            seconds = transfer.seconds().get(tier, 0.0)
        if not sizes or seconds <= 0 or transfer.lost:
            return None
        now_s = self._now_s()
        paid, beside = PaidShares(at_s=now_s), PaidShares(at_s=now_s)
        return TierLink(sizes[0] / seconds, seen_s=now_s, paid=paid, paid_beside=beside)

    def _collect(self) -> None:
        """Take over what finished probes found."""
        for tier, probe in list(self._running.items()):
            if not probe.done.is_set():
                continue
            del self._running[tier]
            if probe.link is not None:
                known = self._links.get(name := link_name(tier, self._codec))
                if known is not None:
                    # a probe loads: what requests pay it cannot tell
                    probe.link.paid, probe.link.paid_beside = known.paid, known.paid_beside
                self._links[name] = probe.link
                self._resting.pop(tier, None)
                continue
            before = self._resting.get(tier)
            length_s = min(2 * before.length_s, LONGEST_REST_S) if before else FIRST_REST_S
            self._resting[tier] = _Rest(self._now_s() + length_s, length_s)

    def _link(self, tier: str) -> TierLink | None:
        return self._links.get(link_name(tier, self._codec)) or self._links.get(tier)

    def _is_fresh(self, tier: str) -> bool:
        link = self._link(tier)
        return link is not None and self._now_s() - link.seen_s < STALE_S

    def _rests(self, tier: str) -> bool:
        rest = self._resting.get(tier)
        return rest is not None and self._now_s() < rest.until_s
