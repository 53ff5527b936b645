"""A second look at what a search found: a cross-encoder reads question and chunk together.

It is slower than a search and better at the order, so it sees a few times as many chunks as are
wanted and the best of those are taken. Which one is named in the configuration; there is none by
default.
"""

import functools
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from kvweave.errors import ConfigError, ModelNotFound

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
        try:
            from sentence_transformers import CrossEncoder
            from transformers.utils import logging as transformers_logging
        except ImportError as error:
            raise ConfigError(
                f"a reranker needs sentence-transformers ({error}); "
                "pip install 'kvweave[embedders]'"
            ) from error
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # over ours
        try:
            return CrossEncoder(self.name)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ModelNotFound(
                f"no reranker {self.name!r}: give a cross-encoder's folder or a hub name "
                f"({reason[:200]})"
            ) from error


@functools.cache
def find_reranker(name: str) -> Reranker:
    """The one of that name; all that ask for it in this process share it."""
    return CrossEncoderReranker(name)
