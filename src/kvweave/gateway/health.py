"""Looks at every replica again and again, each on a thread of its own: one that hangs holds up no
other."""

import threading
import time
from collections.abc import Sequence

from kvweave.errors import UpstreamError
from kvweave.gateway.cards import UpstreamCard
from kvweave.gateway.fleet import Fleet
from kvweave.gateway.replica import Replica

ABOUT_S = 2.0  # that replicas which are up may differ by, when a gateway starts
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
        """The card of the first replica that answers; of several that do so at about the same time,
        of the one that is named first. Raises UpstreamError."""
        give_up_s = time.monotonic() + timeout_s
        while self._fleet.card() is None:
            if time.monotonic() >= give_up_s or self._stopped.is_set():
                told = "; ".join(replica.words for replica in self._fleet.replicas)
                raise UpstreamError(f"no upstream answers within {timeout_s:g} s: {told}")
            time.sleep(0.02)
        give_up_s = min(give_up_s, time.monotonic() + ABOUT_S)
        while self._fleet.is_any_unseen() and time.monotonic() < give_up_s:
            time.sleep(0.02)
        card = self._fleet.card()
        return card if card is not None else self.wait_for_one(timeout_s)  # it died meanwhile

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
