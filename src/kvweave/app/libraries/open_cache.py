"""Knowledge bases that are open: a few at a time, lent to the requests that use them.

An open knowledge base has memory of its own (its host tier, its index, file handles). So there is
room for some; the one that was not used for the longest time is closed for the next. One that is
lent is never closed, nor one of whose chunk KV a lease is left: a request that finds all of them in
use waits a while and is then refused.

Any thread.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvweave.errors import CorpusError, EngineClosed

log = logging.getLogger(__name__)

LEASE_S = 0.05  # between two looks at a lease that a request has left behind

Key = TypeVar("Key")


class AllInUse(CorpusError):
    """No knowledge base can make way now. Try again later."""


class InUse(CorpusError):
    """This very knowledge base is used by others. Try again later."""


class Lendable(Protocol):
    """What is lent: a Weave over a knowledge base."""

    def is_at_rest(self) -> bool:
        """Nothing that was begun with it still holds its chunk KV. May wait for a step."""
        ...

    def close(self) -> None: ...


T = TypeVar("T", bound=Lendable)


class OpenCounts(NamedTuple):
    """How many are open and used now, and how often one was opened and closed."""

    open: int
    in_use: int
    opened: int
    closed: int
    close_failures: int  # closed, and not in order


class _Copy(Generic[T]):
    """One knowledge base that is open, being opened or being closed."""

    def __init__(self) -> None:
        self.thing: T | None = None  # None: it is being opened
        self.num_loans = 0
        self.is_closing = False
        self.writing = threading.Lock()  # one writer; the others wait

    @property
    def is_idle(self) -> bool:
        return self.thing is not None and not self.num_loans and not self.is_closing


class Loan(Generic[T]):
    """One use of an open knowledge base. Give it back; twice is harmless."""

    def __init__(self, thing: T, writing: threading.Lock, give_back: Callable[[], None]) -> None:
        self.thing = thing
        self.writing = writing
        self._give_back = give_back
        self._lock = threading.Lock()
        self._is_back = False

    def give_back(self) -> None:
        with self._lock:
            is_back, self._is_back = self._is_back, True
        if not is_back:
            self._give_back()


class OpenCache(Generic[Key, T]):
    """Keeps a few knowledge bases open."""

    def __init__(self, open_one: Callable[[Key], T], most: int, wait_s: float) -> None:
        """`open_one` may take a while; it is called on the thread that asks first."""
        self._open_one = open_one
        self._most = most
        self._wait_s = wait_s
        self._changed = threading.Condition()  # guards the rest; never held for long
        self._copies: OrderedDict[Key, _Copy[T]] = OrderedDict()  # used last, last
        self._closed = False
        self._num_opened = self._num_closed = self._num_close_failures = 0

    def lend(self, place: Key) -> Loan[T]:
        """A loan, for which the knowledge base is opened if it is not. Raises AllInUse if there is
        no room and none is to be had, EngineClosed after `close`, and what opening raises."""
        give_up_s = time.monotonic() + self._wait_s
        while True:
            with self._changed:
                self._refuse_if_closed()
                copy = self._copies.get(place)
                if copy is not None and copy.thing is not None and not copy.is_closing:
                    copy.num_loans += 1
                    return self._loan(place, copy, copy.thing)
                if copy is None and len(self._copies) < self._most:
                    copy = self._copies[place] = _Copy()
                    break
                if copy is not None:  # another thread opens or closes it, however long that takes
                    self._changed.wait()
                    continue
                idle = self._oldest_idle()
                if idle is None:
                    if not self._changed.wait(max(0.0, give_up_s - time.monotonic())):
                        raise self._all_in_use()
                    continue
                idle[1].is_closing = True
            if not self._make_room(*idle):  # a lease is left: it will not be long
                if time.monotonic() >= give_up_s:
                    raise self._all_in_use()
                time.sleep(LEASE_S)
        return self._open(place, copy)

    def retire(self, place: Key, last: Callable[[T], None], then: Callable[[], None]) -> None:
        """End a knowledge base: once nobody uses it, `last` is called with it (opened if it is
        not), it is closed, and `then` is called. Nobody can borrow it meanwhile; those who want to
        wait. Raises InUse if it is still lent after a while, and then nothing has happened; also
        what the calls raise."""
        give_up_s = time.monotonic() + self._wait_s
        with self._changed:
            while (copy := self._copies.get(place)) is not None and not copy.is_idle:
                self._refuse_if_closed()
                if not self._changed.wait(max(0.0, give_up_s - time.monotonic())):
                    raise InUse("it is in use by an answer or an upload; try again in a moment")
            self._refuse_if_closed()
            copy = self._copies.setdefault(place, _Copy())
            copy.is_closing = True
        thing = copy.thing
        if thing is not None:
            try:
                self._wait_for_rest(thing, give_up_s)
            except BaseException:
                self._go_on(place, copy, thing)
                raise
        try:
            thing = thing or self._open_one(place)
            try:
                last(thing)
            finally:
                self._close(place, thing)
            then()
        finally:
            self._drop(place)

    def _wait_for_rest(self, thing: T, give_up_s: float) -> None:
        while not thing.is_at_rest():
            if time.monotonic() >= give_up_s:
                raise InUse("an answer still holds its chunk KV; try again in a moment")
            time.sleep(LEASE_S)

    @contextmanager
    def all_open(self) -> Iterator[list[tuple[Key, T]]]:
        """What is open now; none of it closes meanwhile."""
        with self._changed:
            found = [
                (place, copy, copy.thing)
                for place, copy in self._copies.items()
                if copy.thing is not None and not copy.is_closing
            ]
            for _, copy, _ in found:
                copy.num_loans += 1
        try:
            yield [(place, thing) for place, _, thing in found]
        finally:
            for place, copy, _ in found:
                self._take_back(place, copy, was_used=False)

    def counts(self) -> OpenCounts:
        with self._changed:
            copies = list(self._copies.values())
            in_use = sum(copy.num_loans > 0 for copy in copies)
            done = self._num_opened, self._num_closed, self._num_close_failures
            return OpenCounts(len(copies), in_use, *done)

    def stop(self) -> None:
        """Lend no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Lend no more and close all, lent or not: a request that still uses one fails."""
        self.stop()
        with self._changed:
            copies = [(p, c.thing) for p, c in self._copies.items() if c.thing and not c.is_closing]
            self._copies.clear()
        for place, thing in copies:
            self._close(place, thing)

    # ── opening and closing ──────────────────────────────────────────────────

    def _open(self, place: Key, copy: _Copy[T]) -> Loan[T]:
        """Open what has its room already; others who want it wait, others yet do not."""
        try:
            thing = self._open_one(place)
        except BaseException:
            self._drop(place)
            raise
        with self._changed:
            if not self._closed:
                copy.thing, copy.num_loans = thing, 1
                self._num_opened += 1
                self._changed.notify_all()
                return self._loan(place, copy, thing)
        thing.close()
        raise EngineClosed("the knowledge bases were closed")

    def _make_room(self, place: Key, copy: _Copy[T]) -> bool:
        """Close one that is not lent. False: it is needed after all."""
        thing = copy.thing
        assert thing is not None, "it is open"
        is_at_rest = False
        try:
            is_at_rest = thing.is_at_rest()
        finally:
            if not is_at_rest:
                self._go_on(place, copy, thing)
        if not is_at_rest:
            return False
        try:
            self._close(place, thing)
        finally:
            self._drop(place)
        return True

    def _go_on(self, place: Key, copy: _Copy[T], thing: T) -> None:
        """It stays, and another is looked at before it is again."""
        with self._changed:
            copy.is_closing = False
            was_left_out = self._copies.get(place) is not copy  # by `close`, which came meanwhile
            if not was_left_out:
                self._copies.move_to_end(place)
            self._changed.notify_all()
        if was_left_out:
            self._close(place, thing)

    def _drop(self, place: Key) -> None:
        with self._changed:
            copy = self._copies.pop(place, None)
            if copy is not None and copy.thing is not None:
                self._num_closed += 1
            self._changed.notify_all()

    def _oldest_idle(self) -> tuple[Key, _Copy[T]] | None:
        """Lock is held."""
        return next(((p, copy) for p, copy in self._copies.items() if copy.is_idle), None)

    def _all_in_use(self) -> AllInUse:
        return AllInUse(f"all {self._most} knowledge bases that may be open are in use")

    def _refuse_if_closed(self) -> None:
        """Lock is held."""
        if self._closed:
            raise EngineClosed("the knowledge bases were closed")

    def _loan(self, place: Key, copy: _Copy[T], thing: T) -> Loan[T]:
        return Loan(thing, copy.writing, lambda: self._take_back(place, copy))

    def _take_back(self, place: Key, copy: _Copy[T], *, was_used: bool = True) -> None:
        with self._changed:
            copy.num_loans -= 1
            if was_used and place in self._copies:
                self._copies.move_to_end(place)
            self._changed.notify_all()

    def _close(self, place: Key, thing: T) -> None:
        """What fails here is logged and counted: it is gone either way. Takes the lock."""
        try:
            thing.close()
        except Exception:
            log.exception("the knowledge base %s was not closed in order", place)
            with self._changed:
                self._num_close_failures += 1
