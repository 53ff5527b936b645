"""One fault: where it strikes, what it does, how often. Shared by the proxies and the hooks."""

import json
import os
import random
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

# what is being done when it strikes
LOOKUP = "lookup"  # is it there?
LOAD_FIRST = "load of the first layer"
LOAD_MIDDLE = "load of a middle layer"
SAVE = "save"
EVICT = "evict"
START = "start"  # anything, while a server starts
ANY = "any"
OPS = (LOOKUP, LOAD_FIRST, LOAD_MIDDLE, SAVE, EVICT, START)

# what goes wrong
SLOW = "slow"
HANG = "hang"
ERROR = "error"
TRUNCATED = "truncated"
CORRUPTED = "corrupted"
FULL = "full"
FORBIDDEN = "permission lost"
GONE = "gone and back"
KINDS = (SLOW, HANG, ERROR, TRUNCATED, CORRUPTED, FULL, FORBIDDEN, GONE)


@dataclass(frozen=True, slots=True)
class FaultRule:
    """What is to go wrong from now on."""

    op: str
    kind: str
    times: int | None = None  # strikes so often; None: until it is cleared
    delay_s: float = 0.3  # of a slow one
    seed: int = 0  # which byte, where it is cut

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "FaultRule":
        return cls(**json.loads(text))


class Strikes:
    """The rule in force and how often it has struck. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rule: FaultRule | None = None
        self._fired = 0
        self._released = threading.Event()  # hangs end
        self._random = random.Random(0)

    def set(self, rule: FaultRule) -> None:
        with self._lock:
            self._rule, self._fired = rule, 0
            self._released = threading.Event()
            self._random = random.Random(rule.seed)

    def clear(self) -> int:
        """End the fault, hangs included; returns how often it struck."""
        with self._lock:
            self._rule = None
            self._released.set()
            fired, self._fired = self._fired, 0
            return fired

    @property
    def fired(self) -> int:
        return self._fired

    def strike(self, op: str) -> FaultRule | None:
        """The fault that hits this call, if any."""
        with self._lock:
            rule = self._rule
            if rule is None or rule.op not in (op, ANY, START):
                return None
            if rule.times is not None and self._fired >= rule.times:
                return None
            self._fired += 1
            return rule

    def refuses(self) -> bool:
        """Whether what stands behind is not to be reached at all; then this was a strike."""
        with self._lock:
            is_gone = self._rule is not None and self._rule.kind == GONE
            self._fired += is_gone
            return is_gone

    def hang(self) -> None:
        """Until the fault is cleared."""
        self._released.wait(300)

    def draw(self, below: int) -> int:
        with self._lock:
            return self._random.randrange(max(1, below))

    def damaged(self, data: bytes) -> bytes:
        """With one bit changed."""
        if not data:
            return data
        at, bit = self.draw(len(data)), self.draw(8)
        return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def spoil(path: Path, at: int, kind: str, seed: int) -> None:
    """Cut a file at a byte, or flip a bit of it: in place, as a bad medium does."""
    if kind == TRUNCATED:
        os.truncate(path, at)
        return
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << seed % 8)]))
