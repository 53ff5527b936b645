"""A second look at what a search found: a cross-encoder reads question and chunk together.

It is slower than a search and better at the order, so it sees a few times as many chunks as are
wanted and the best of those are taken. Which one is named in the configuration; there is none by
default.
"""

import functools
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from kvweave.corpus.embedder import loading_model
from kvweave.errors import ConfigError

BATCH = 16  # pairs computed at a time


class Reranker(Protocol):
    """Scores texts by how well they answer a query. Any thread; may block."""

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """One for each text; higher is better."""
        ...


class CrossEncoderReranker:
    """A cross-encoder by sentence-transformers: a folder, or a name that the hub knows. Loaded on
    first use; one call at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._model: Any = None
        self._lock = threading.Lock()

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        if not texts:
            return []
        with self._lock:
            if self._model is None:
                self._model = self._load()
            found = self._model.predict(
                [(query, text) for text in texts], batch_size=BATCH, show_progress_bar=False
            )
        if getattr(found, "ndim", 1) != 1:
            raise ConfigError(
                f"{self.name!r} gives {found.shape[1]} scores for a text; a reranker gives one"
            )
        return [float(score) for score in found]

    def _load(self) -> Any:
        with loading_model("reranker", self.name, "a cross-encoder's folder"):
            from sentence_transformers import CrossEncoder

            return CrossEncoder(self.name)


@functools.cache
def find_reranker(name: str) -> Reranker:
    """The one of that name; all that ask for it in this process share it."""
    return CrossEncoderReranker(name)
