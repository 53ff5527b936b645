"""Faults that nothing outside a process can cause: `kvweave serve` behind hooks that a bench sets.

    python -c "from reliability.fault_hooks import main; main()" CONTROL serve --port 0 …

The server is the real one, unchanged: before it is imported, calls at its edges are wrapped. At the
edge to the system those of `os` that touch a file of chunk KV (slow, hang, error, full: what a bad
disk does), at the edge to memory the host tier's arena, at the edge to the device `Decoder.forward`
and the selectors. CONTROL is a socket in the file system: a line of JSON in, a line out.
The product has no hook.
"""

import errno
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reliability.fault_proxies import Layers
from reliability.fault_rules import (
    CORRUPTED,
    ERROR,
    EVICT,
    FORBIDDEN,
    FULL,
    HANG,
    LOOKUP,
    SAVE,
    SLOW,
    TRUNCATED,
    FaultRule,
    Strikes,
)

OPEN = "open"
FORWARD = "forward"  # a pass of the model
SELECT = "select"  # choosing rows
OUT_OF_MEMORY = "out of device memory"
DEAD = "dead thread"
NO_NUMBERS = "logits that are no numbers"
ALWAYS = "a request that always fails"
NUMBERS = {ERROR: errno.EIO, FULL: errno.ENOSPC, FORBIDDEN: errno.EACCES}
MOST_OPENED = 64
SUFFIX = ".kv"


class DiskHooks:
    """Wraps what `kv/tiers/disk.py` asks of the system."""

    def __init__(self, strikes: Strikes) -> None:
        self.strikes = strikes
        self.layers = Layers()
        self.opened: deque[str] = deque(maxlen=MOST_OPENED)  # objects, newest last
        self._real: dict[str, Callable[..., Any]] = {}
        self._writing: set[int] = set()  # descriptors of objects being written

    def install(self) -> None:
        for name in ("open", "preadv", "stat", "writev", "fsync", "replace", "unlink"):
            self._real[name] = getattr(os, name)
            setattr(os, name, getattr(self, f"_{name}"))

    def _open(self, path: Any, flags: int, *args: Any, **how: Any) -> int:
        is_ours = _is_object(path)
        if is_ours and not flags & os.O_CREAT:
            self.opened.append(os.fspath(path))
            self._stumble(OPEN)
        descriptor: int = self._real["open"](path, flags, *args, **how)
        if flags & os.O_CREAT and _is_temporary(path):
            self._writing.add(descriptor)
        else:
            self._writing.discard(descriptor)
        return descriptor

    def _preadv(self, descriptor: int, buffers: Any, offset: int, *more: Any) -> int:
        rule = self._stumble(self.layers.op(offset))
        if rule is not None and rule.kind == TRUNCATED:
            return 0
        got: int = self._real["preadv"](descriptor, buffers, offset, *more)
        if rule is not None and rule.kind == CORRUPTED and got:
            at = self.strikes.draw(got)
            buffers[0][at] ^= 1 << self.strikes.draw(8)
        return got

    def _stat(self, path: Any, *args: Any, **how: Any) -> Any:
        if _is_object(path):
            self._stumble(LOOKUP)
        return self._real["stat"](path, *args, **how)

    def _writev(self, descriptor: int, parts: Any) -> int:
        if descriptor in self._writing:
            self._stumble(SAVE)
        got: int = self._real["writev"](descriptor, parts)
        return got

    def _fsync(self, descriptor: int) -> None:
        self._real["fsync"](descriptor)

    def _replace(self, source: Any, target: Any, **how: Any) -> None:
        self._real["replace"](source, target, **how)

    def _unlink(self, path: Any, **how: Any) -> None:
        if _is_object(path):
            self._stumble(EVICT)
        self._real["unlink"](path, **how)

    def _stumble(self, op: str) -> FaultRule | None:
        """The faults that can hit any call; others are the caller's."""
        rule = self.strikes.strike(op)
        if rule is None:
            return None
        if rule.kind == SLOW:
            time.sleep(rule.delay_s)
        elif rule.kind == HANG:
            self.strikes.hang()
            raise OSError(errno.EIO, "Input/output error (injected)")
        elif rule.kind in NUMBERS:
            number = NUMBERS[rule.kind]
            raise OSError(number, f"{os.strerror(number)} (injected)")
        return rule


def _is_object(path: Any) -> bool:
    return isinstance(path, str | Path) and os.fspath(path).endswith(SUFFIX)


def _is_temporary(path: Any) -> bool:
    text = os.fspath(path) if isinstance(path, str | Path) else ""
    return text.endswith(".tmp") and "/kv/" in text


def hook_host(strikes: Strikes) -> None:
    """The host tier's arena: no room though the books say so, or an error, or late."""
    from kvweave.errors import TierError
    from kvweave.kv.tiers.host import HostTier

    def wrap(name: str, op: str) -> None:
        real = getattr(HostTier, name)

        def call(self: HostTier, *args: Any, **how: Any) -> Any:
            rule = strikes.strike(op)
            if rule is not None and rule.kind == SLOW:
                time.sleep(rule.delay_s)
            elif rule is not None and rule.kind == ERROR:
                raise TierError(f"{name} failed (injected)")
            elif rule is not None and rule.kind == FULL and name == "reserve":
                return None
            return real(self, *args, **how)

        setattr(HostTier, name, call)

    wrap("reserve", SAVE)
    wrap("detach", EVICT)


def hook_engine(strikes: Strikes, marked: Callable[[], int | None]) -> None:
    """Passes of the model and the choice of rows. A request that has the token `marked` is one that
    always fails."""
    import torch

    from kvweave.fuse.selectors.query_attention import QueryAttention
    from kvweave.model.decoder import Decoder

    real_forward, real_ranked = Decoder.forward, QueryAttention.select

    def forward(self: Decoder, batch: Any) -> Any:
        mark = marked()
        if mark is not None:
            if any(mark in list(rows.token_ids) for rows in batch):
                strikes.strike(FORWARD)
                raise RuntimeError("this request cannot be computed (injected)")
            return real_forward(self, batch)
        rule = strikes.strike(FORWARD)
        if rule is None:
            return real_forward(self, batch)
        if rule.kind == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        if rule.kind == DEAD:
            raise SystemExit(3)
        if rule.kind == HANG:
            strikes.hang()
        if rule.kind == SLOW:
            time.sleep(rule.delay_s)
        logits = real_forward(self, batch)
        return logits * float("nan") if rule.kind == NO_NUMBERS else logits

    def ranked(self: QueryAttention, scene: Any, counts: Any) -> Any:
        if strikes.strike(SELECT) is not None:
            raise RuntimeError("no rows can be chosen (injected)")
        return real_ranked(self, scene, counts)

    Decoder.forward = forward  # type: ignore[method-assign]
    QueryAttention.select = ranked  # type: ignore[method-assign]


class Control:
    """Takes orders from the bench, on a thread of its own."""

    def __init__(self, path: str) -> None:
        self.strikes = Strikes()
        self.disk = DiskHooks(self.strikes)
        self._marked: int | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()

    def start(self) -> None:
        self.disk.install()
        hook_host(self.strikes)
        hook_engine(self.strikes, lambda: self._marked)
        threading.Thread(target=self._listen, name="fault-control", daemon=True).start()

    def _listen(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rw") as file:
                order = json.loads(file.readline())
                file.write(json.dumps(self._obey(order)) + "\n")

    def _obey(self, order: dict[str, Any]) -> Any:
        match order["do"]:
            case "set":
                self._marked = order.get("marked")
                self.strikes.set(FaultRule(**order["rule"]))
            case "clear":
                self._marked = None
                return self.strikes.clear()
            case "fired":
                return self.strikes.fired
            case "layers":
                self.disk.layers = Layers(*order["layers"])
            case "opened":
                opened = list(self.disk.opened)
                self.disk.opened.clear()
                return opened
        return None


def order(path: Path, do: str, **more: Any) -> Any:
    """Send one order to a server behind hooks; its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(path))
        with connection.makefile("rw") as file:
            file.write(json.dumps({"do": do, **more}) + "\n")
            file.flush()
            return json.loads(file.readline())


def main() -> None:
    control = Control(sys.argv[1])
    sys.argv = ["kvweave", *sys.argv[2:]]
    control.start()
    from kvweave.cli import main as run

    run()
