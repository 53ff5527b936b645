"""Looks at every replica again and again, each on a thread of its own: one that hangs holds up no
other."""

import threading
import time
from collections.abc import Sequence

from kvweave.errors import UpstreamError
from kvweave.gateway.cards import UpstreamCard
from kvweave.gateway.fleet import Fleet
from kvweave.gateway.replica import Replica

SOON_S = 0.2  # between two looks at a replica that was never seen


class HealthWatch:
    """`start` it once and `close` it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stopped = threading.Event()
        self._threads: Sequence[threading.Thread] = [
            threading.Thread(target=self._watch, args=(replica,), name="health", daemon=True)
            for replica in fleet.replicas
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_for_one(self, timeout_s: float) -> UpstreamCard:
        """The card of the first replica that answers. Raises UpstreamError."""
        give_up_s = time.monotonic() + timeout_s
        while (card := self._fleet.card()) is None:
            if time.monotonic() >= give_up_s or self._stopped.is_set():
                names = ", ".join(replica.name for replica in self._fleet.replicas)
                raise UpstreamError(f"no upstream answers within {timeout_s:g} s: {names}")
            time.sleep(0.02)
        return card

    def close(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _watch(self, replica: Replica) -> None:
        while not self._stopped.is_set():
            self._fleet.look(replica)
            is_new = replica.card is None
            self._stopped.wait(
                min(SOON_S, self._fleet.cfg.health_s) if is_new else self._fleet.cfg.health_s
            )
