"""In which runs an object is read, and in which order.

Plain bookkeeping: no IO, no lock. The lock of the arrival covers every call.
"""

from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from kvweave.kv.format.header import Header


class ReadSpan(NamedTuple):
    """A run of bytes that is read at once: first layer, one past the last, and where they lie."""

    first: int
    end: int
    start_byte: int
    end_byte: int


def plan_spans(
    header: Header, best_read_bytes: int, first_layers: Collection[int] = ()
) -> list[ReadSpan]:
    """Cut the layers into runs, in the order they lie in the object.

    Runs double from a sixteenth of `best_read_bytes` up to it: the first layer comes soon, the rest
    in few reads. Few matters: between reads a thread needs the interpreter lock, and two threads
    that ask for it every 50 µs take turns instead of working side by side. `first_layers` share no
    run with others, so that nothing comes along that is not waited for yet.
    """
    spans: list[ReadSpan] = []
    first, want_bytes = 0, best_read_bytes // 16
    num_layers = len(header.layers)
    for i in range(num_layers):
        start_byte, end_byte = header.layers[first].offset, header.padded_end(header.layers[i])
        is_last = i == num_layers - 1 or (i in first_layers) != (i + 1 in first_layers)
        if is_last or end_byte - start_byte >= want_bytes:
            spans.append(ReadSpan(first, i + 1, start_byte, end_byte))
            first = i + 1
            want_bytes = min(2 * want_bytes, best_read_bytes)
    return spans


def extra_runs(header: Header, names: Collection[str]) -> list[tuple[int, int]]:
    """Where these extras lie: start and end of each run of bytes, in order."""
    runs: list[tuple[int, int]] = []
    for name, section in header.extras.items():
        if name in names:
            start, end = section.offset, header.padded_end(section)
            if runs and runs[-1][1] == start:
                start, _ = runs.pop()
            runs.append((start, end))
    return runs


class ReadingOrder:
    """Which run of layers is read next. Layers are asked for by number, before or after the header
    is there, and taken as spans once it is."""

    def __init__(self) -> None:
        self._asked: deque[int] = deque()  # layers not looked at yet, in the order asked for
        self._first: set[int] = set()
        self._span_of: list[ReadSpan] = []  # by layer; empty until planned
        self._taken: set[ReadSpan] = set()

    def ask(self, layers: Iterable[int]) -> None:
        """Ask for layers after all that was asked for before. Asking again is harmless."""
        self._asked.extend(layers)

    def ask_first(self, layers: Iterable[int]) -> None:
        """These come before all that was asked for, in this order, in runs of their own if the
        object is not open yet."""
        layers = list(layers)
        self._first.update(layers)
        self._asked.extendleft(reversed(layers))

    def plan(self, header: Header, best_read_bytes: int) -> int:
        """The object is open: from now on there are spans to take. Returns how many in all."""
        spans = plan_spans(header, best_read_bytes, self._first)
        self._span_of = [span for span in spans for _ in range(span.first, span.end)]
        return len(spans)

    def num_due(self, most: int) -> int:
        """How many spans can be taken now; counts no further than `most`."""
        due: set[ReadSpan] = set()
        for layer in self._asked:
            if len(due) >= most:
                break
            if layer < len(self._span_of) and self._span_of[layer] not in self._taken:
                due.add(self._span_of[layer])
        return len(due)

    def take(self) -> ReadSpan | None:
        """The next span to read, once. None: nothing that was asked for is left."""
        while self._asked and self._span_of:
            layer = self._asked.popleft()
            if layer >= len(self._span_of) or self._span_of[layer] in self._taken:
                continue  # there is no such layer, or it came along with another
            span = self._span_of[layer]
            self._taken.add(span)
            return span
        return None
