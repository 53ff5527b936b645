"""What became of the chunk KV that an encoder has saved."""

import threading
import time
from typing import NamedTuple

from kvweave.kv.store import KVStore
from kvweave.kv.writer import SaveTicket
from kvweave.metrics import Metrics

LOOK_S = 1.0  # between two looks at whether a write hangs
SETTLE = 256  # open promises kept at a time before the answered ones are counted


class Saves(NamedTuple):
    """Objects by outcome: a chunk has one behind its encoding context, and one isolated if it has
    stood in front. What it brings where it is a neighbour is not among them."""

    saved: int
    dropped: int  # no tier that outlives this process has them; requests compute them
    reasons: tuple[str, ...] = ()  # of what was dropped, in words


class SaveLog:
    """Counts answered promises. Any thread."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: list[SaveTicket] = []
        self._num_saved = self._num_dropped = 0

    def add(self, ticket: SaveTicket) -> None:
        with self._lock:
            self._open.append(ticket)
            if len(self._open) >= SETTLE:
                self._settle()

    def add_dropped(self) -> None:
        with self._lock:
            self._num_dropped += 1

    def finish(self, timeout_s: float) -> Saves:
        """Wait for what is under way, unless a write hangs. What no tier has answered by then is
        not saved."""
        give_up_s = time.monotonic() + timeout_s
        with self._lock:
            open_ones = list(self._open)
        for ticket in open_ones:
            while not ticket.is_answered and not self._store.writes_hang():
                if (left_s := give_up_s - time.monotonic()) <= 0:
                    break
                ticket.wait(min(LOOK_S, left_s))
        with self._lock:
            self._settle()
            num_open = len(self._open)
            saved, dropped = self._num_saved, self._num_dropped + num_open
        metrics = self._store.metrics
        reasons = _reasons(metrics) if dropped else ()
        if num_open:
            reasons = (*reasons, "the tier is too slow")
        return Saves(saved, dropped, reasons)

    def _settle(self) -> None:
        """Count the saves that were answered. The caller holds the lock."""
        answered = [ticket for ticket in self._open if ticket.is_answered]
        self._open = [ticket for ticket in self._open if not ticket.is_answered]
        kept = sum(ticket.wait(0.0) for ticket in answered)
        self._num_saved += kept
        self._num_dropped += len(answered) - kept


def _reasons(metrics: Metrics) -> tuple[str, ...]:
    """Why saves were dropped, as the store counted it."""
    names = {"kv_saves_dropped_total", "kv_admissions_refused_total"}
    found = set()
    for sample in metrics.snapshot():
        labels = dict(sample.labels)
        if sample.name in names and labels.get("tier") != "host":
            found.add(labels["reason"])
        elif sample.name == "kv_tier_errors_total" and labels.get("verb") == "write":
            found.add("a write failed")
    return tuple(sorted(found))
