"""Parsing in a process of its own, which can be killed: parsers of foreign files have no bound.

A few bytes of a table, a PDF or a Word document can ask a parser for minutes or gigabytes, and no
thread can be stopped. So files are parsed in a child (`child.py`) within limits of time, memory and
size. A child serves many files, one at a time; one that fails a file is gone with it. A short text
is parsed here: that costs nothing that a limit could save.
"""

import atexit
import functools
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from kvweave.child_process import FOLDER, make_child_environment
from kvweave.corpus.parsers import ENDINGS, parse
from kvweave.corpus.parsers.base import ParsedRecord, ParseLimits
from kvweave.corpus.parsers.child import FIELDS, HEAD, REASON, RECORDS, SIZE
from kvweave.errors import CorpusError

SHORT_BYTES = 256 << 10  # of a text that is parsed here
MOST_IDLE = 2  # processes that are kept for the next file
PIECE_BYTES = 1 << 20
TICK_S = 0.2  # between two calls of the caller's `tick`, while it waits
NUM_FIELDS = len(ParsedRecord._fields)
ROOM_BYTES = 64 << 20  # of a reply, for keys, titles and lengths

Tick = Callable[[], None]  # on the caller's thread, while it waits; what it raises ends the wait


def parse_in_child(
    path: Path, data: bytes, limits: ParseLimits, tick: Tick = lambda: None
) -> list[ParsedRecord]:
    """Parse a file in a child; `path` is looked at for its name alone. Raises CorpusError, which
    says what the file did, and what `tick` raises."""
    parser = ENDINGS.get(path.suffix.lower())
    if parser is not None and (parser != "text.parse_text" or len(data) > SHORT_BYTES):
        return _pool().ask(path.name, data, limits, tick)
    try:
        return parse(path, data, limits)
    except CorpusError:
        raise
    except Exception as error:  # as in the child
        raise CorpusError(
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error


def read_fields(data: bytes) -> dict[str, object]:
    """The fields of a JSON object by name, read in a child: a large one would hold up all threads.
    Of a value that is no text, the beginning of its JSON. Raises CorpusError."""
    found = _pool().ask(FIELDS, data, ParseLimits(), lambda: None)
    return {name: value if kind == "text" else json_value(value) for name, kind, value, _ in found}


def json_value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:  # cut off
        return [text]


class ParserChild:
    """One process. One file at a time; any thread."""

    def __init__(self) -> None:
        environment = make_child_environment()
        package = str(Path(__file__).resolve().parents[3])
        paths = filter(None, [package, environment.get("PYTHONPATH")])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvweave.corpus.parsers.child"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
            cwd=FOLDER,
            start_new_session=True,  # Ctrl-C is for us, who end it
        )
        assert self._process.stdin is not None, "asked for"
        assert self._process.stdout is not None, "asked for"
        self._in, self._out = self._process.stdin, self._process.stdout
        for pipe in (self._in, self._out):
            os.set_blocking(pipe.fileno(), False)

    def ask(self, request: bytes, data: bytes, limits: ParseLimits, tick: Tick) -> list[str] | None:
        """The parts of all records, one behind the other. None: it had left before it was asked.
        Raises CorpusError with the reason; TimeoutError, OverflowError and what `tick` raises, and
        it must be closed then."""
        deadline_s = time.monotonic() + limits.seconds
        most_bytes = 4 * limits.text_chars + ROOM_BYTES

        def wait(fd: int, event: int) -> None:
            poll = select.poll()  # not `select`: a server may have more than 1024 files open
            poll.register(fd, event)
            while not poll.poll(TICK_S * 1000):
                if time.monotonic() > deadline_s:
                    raise TimeoutError
                tick()

        def read(num_bytes: int) -> bytearray:
            if num_bytes > most_bytes:
                raise OverflowError
            got = bytearray()
            while len(got) < num_bytes:
                wait(self._out.fileno(), select.POLLIN)
                piece = self._out.read(min(PIECE_BYTES, num_bytes - len(got)))
                if not piece:
                    raise EOFError
                got += piece
            return got

        try:
            for part in (request, data):
                left = memoryview(part)
                while left:
                    wait(self._in.fileno(), select.POLLOUT)
                    left = left[self._in.write(left[:PIECE_BYTES]) or 0 :]
            kind = bytes(read(1))
            (size,) = SIZE.unpack(read(SIZE.size))
            if kind == REASON:
                raise CorpusError(read(size).decode(errors="replace"))
            assert kind == RECORDS, "a reply is one or the other"
            count = NUM_FIELDS * size
            lengths = struct.unpack(f"<{count}Q", read(count * SIZE.size))
            parts = memoryview(read(sum(lengths)))
        except (EOFError, BrokenPipeError):
            self._check_left()
            return None
        texts, at = [], 0
        for length in lengths:
            texts.append(str(parts[at : at + length], "utf-8"))
            at += length
        return texts

    @property
    def pid(self) -> int:
        return self._process.pid

    def let_go(self) -> None:
        """It leaves by itself, as one that was idle for long."""
        self._in.close()
        self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Kill it, whatever it does, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()

    def _check_left(self) -> None:
        """It is gone: of its own accord, or the file did it. Raises CorpusError then."""
        code = self._process.wait()
        if code:
            how = signal.Signals(-code).name if code < 0 else f"code {code}"
            raise CorpusError(f"its parser died of it ({how}); convert or split the file")


class ParserPool:
    """Children that wait for files. Any thread; each file has a child to itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[ParserChild] = []

    def ask(self, name: str, data: bytes, limits: ParseLimits, tick: Tick) -> list[ParsedRecord]:
        """The records of a file. Raises CorpusError, and what `tick` raises."""
        head = json.dumps({"name": name, "limits": asdict(limits)}).encode()
        request = HEAD.pack(len(head), len(data)) + head
        while True:
            child = self._take()
            try:
                texts = child.ask(request, data, limits, tick)
            except CorpusError:
                self._give_back(child)
                raise
            except TimeoutError:
                child.close()
                raise CorpusError(
                    f"reading it took longer than {limits.seconds:g} s; split it, or raise "
                    "library.parse_s"
                ) from None
            except OverflowError:
                child.close()
                raise CorpusError(f"more than {limits.text_chars:,} characters of text") from None
            except BaseException:
                child.close()
                raise
            if texts is not None:
                self._give_back(child)
                starts = range(0, len(texts), NUM_FIELDS)
                return [ParsedRecord(*texts[i : i + NUM_FIELDS]) for i in starts]
            child.close()  # it had left: another one

    @property
    def idle(self) -> list[ParserChild]:
        """The children that wait for a file."""
        with self._lock:
            return list(self._idle)

    def close(self) -> None:
        """Harmless the second time; a pool that is used again starts others."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def _take(self) -> ParserChild:
        while True:
            with self._lock:
                child = self._idle.pop() if self._idle else None
            if child is None:
                return ParserChild()
            if child.is_alive:
                return child
            child.close()

    def _give_back(self, child: ParserChild) -> None:
        if child.is_alive:
            with self._lock:
                if len(self._idle) < MOST_IDLE:
                    self._idle.append(child)
                    return
        child.close()


@functools.cache
def _pool() -> ParserPool:
    """The pool that all threads of this process share."""
    pool = ParserPool()
    atexit.register(pool.close)
    return pool
