"""What clients were told of each note, and so what a server may show after it was killed.

A change that was begun and not acknowledged may have happened or not. One that was acknowledged
has. `settle` takes what a check found for the truth from then on.
"""

import threading
from collections.abc import Mapping

from reliability.notes import Version

State = Version | None  # None: the note is not there


class Ledger:
    """Any thread; changes of one note come from one of them, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, State] = {}
        self._begun: dict[int, State] = {}
        self._gone: set[Version] = set()
        self._last: dict[int, int] = {}
        self.acknowledged_uploads = 0
        self.acknowledged_deletions = 0

    def next_version(self, key: int) -> Version:
        """One that was never used."""
        with self._lock:
            self._last[key] = self._last.get(key, 0) + 1
            return Version(key, self._last[key])

    def begin(self, key: int, state: State) -> None:
        with self._lock:
            self._begun[key] = state

    def acknowledge(self, key: int) -> None:
        with self._lock:
            state = self._begun.pop(key)
            before = self._known.get(key)
            if before is not None and before != state:
                self._gone.add(before)
            self._known[key] = state
            if state is None:
                self.acknowledged_deletions += 1
            else:
                self.acknowledged_uploads += 1

    def refuse(self, key: int) -> None:
        """The server said that it did nothing."""
        with self._lock:
            del self._begun[key]

    def now(self, key: int) -> State:
        """The last state that was acknowledged or settled."""
        with self._lock:
            return self._known.get(key)

    def possible(self) -> dict[int, set[State]]:
        """By note, the states that are right."""
        with self._lock:
            keys = {*self._known, *self._begun}
            return {
                key: {self._known.get(key)} | ({self._begun[key]} if key in self._begun else set())
                for key in keys
            }

    def may_be_served(self) -> set[Version]:
        """Versions that are there, or may be."""
        return {state for states in self.possible().values() for state in states if state}

    def gone(self) -> set[Version]:
        """Versions that went for good, as clients were told."""
        with self._lock:
            return set(self._gone)

    def faults(self, seen: Mapping[int, Version]) -> tuple[list[str], list[str]]:
        """(lost, back): notes that are not what was acknowledged, and versions that were deleted
        or replaced and are there."""
        lost: list[str] = []
        back: list[str] = []
        for key, states in self.possible().items():
            found = seen.get(key)
            if found in states:
                continue
            told = " or ".join(sorted("absent" if s is None else s.mark for s in states))
            what = f"note {key} is {'absent' if found is None else found.mark}, told {told}"
            (lost if found is None or None not in states else back).append(what)
        back += [
            f"{v.mark} is there and nobody sent it"
            for k, v in seen.items()
            if k not in self.possible()
        ]
        return lost, back

    def settle(self, seen: Mapping[int, Version]) -> None:
        """What was in doubt is now what was seen."""
        with self._lock:
            for key in {*self._known, *self._begun}:
                before, found = self._known.get(key), seen.get(key)
                for state in (before, self._begun.get(key)):
                    if state is not None and state != found:
                        self._gone.add(state)
                self._known[key] = found
            self._begun.clear()
