"""Embedders that many threads and knowledge bases share: one per name, one call at a time.

Documents come in by the thousand and take minutes. A question that is to be searched for does not
wait for them but for one slice of them, and while answers are in the making slices are rare: both
compute on the same cores.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvweave.app.library.library import OpenEmbedder
from kvweave.corpus.embedder import Embedder, Vectors

IsQuiet = Callable[[float], bool]  # waits until no answer is in the making, so long at most
# So long documents are embedded at a time. An answer that begins meanwhile has half of the cores
# until the slice is over, and its first token comes so much later.
SLICE_S = 0.05
# of the time, for documents, while answers are in the making. They have half of the cores then, so
# that an answer takes 1.2 times as long.
BUSY_SHARE = 0.2
FIRST_TEXTS = 4  # as long as it is not known how long one takes


def always_quiet(timeout_s: float) -> bool:
    return True


class Embedded(NamedTuple):
    vectors: Vectors  # [N, D]
    num_tokens: int  # read, over all texts


class SharedEmbedder:
    """An embedder that many threads use, one call at a time, questions first."""

    def __init__(self, embedder: Embedder, is_quiet: IsQuiet = always_quiet) -> None:
        self._embedder = embedder
        self._is_quiet = is_quiet
        self._turns = _Turns()
        self._text_s: float | None = None  # what one text took lately
        self.name = embedder.name

    @property
    def identity(self) -> str:
        with self._turns.soon():
            return self._embedder.identity

    @property
    def dim(self) -> int:
        with self._turns.soon():
            return self._embedder.dim

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        """Embed documents that come in, which give way to answers."""
        return self._embed_in_slices(texts, gives_way=True)

    def embed_query(self, text: str) -> Vectors:
        with self._turns.soon():
            return self._embedder.embed_query(text)

    def num_tokens(self, text: str) -> int:
        with self._turns.soon():
            return self._embedder.num_tokens(text)

    def embed(self, texts: Sequence[str], *, as_query: bool) -> Embedded:
        import numpy as np

        if not as_query:
            vectors = self._embed_in_slices(texts, gives_way=False)  # somebody waits for these
        else:
            vectors = np.stack([self.embed_query(text) for text in texts])
        return Embedded(vectors, sum(map(self.num_tokens, texts)))

    def _embed_in_slices(self, texts: Sequence[str], *, gives_way: bool) -> Vectors:
        import numpy as np

        if not texts:
            with self._turns.soon():
                return self._embedder.embed_passages(texts)
        found: list[Vectors] = []
        at = 0
        while at < len(texts):
            is_quiet = not gives_way or self._is_quiet(0.0)
            count = FIRST_TEXTS if self._text_s is None else max(1, int(SLICE_S / self._text_s))
            some = texts[at : at + count]
            with self._turns.later():
                began_s = time.perf_counter()
                found.append(self._embedder.embed_passages(some))
                took_s = time.perf_counter() - began_s
            self._text_s = took_s / len(some)
            at += len(some)
            if not is_quiet:
                self._is_quiet(took_s * (1 / BUSY_SHARE - 1))
        return np.concatenate(found)


class _Turns:
    """One at a time: those that somebody waits for before the others. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        self._num_waiting = 0  # of the first kind

    @contextmanager
    def soon(self) -> Iterator[None]:
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._is_taken)
            finally:
                self._num_waiting -= 1
            self._is_taken = True
        try:
            yield
        finally:
            self._give_back()

    @contextmanager
    def later(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not (self._is_taken or self._num_waiting))
            self._is_taken = True
        try:
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()


class Embedders:
    """One embedder per name, made on first use."""

    def __init__(self, open_embedder: OpenEmbedder, is_quiet: IsQuiet = always_quiet) -> None:
        self._open_embedder = open_embedder
        self._is_quiet = is_quiet
        self._lock = threading.Lock()
        self._made: dict[str, SharedEmbedder] = {}

    def get(self, name: str) -> SharedEmbedder:
        with self._lock:
            if name not in self._made:
                self._made[name] = SharedEmbedder(self._open_embedder(name), self._is_quiet)
            return self._made[name]

    def peek(self, name: str) -> SharedEmbedder | None:
        """The embedder if somebody used it here; None: it was not made yet."""
        with self._lock:
            return self._made.get(name)
