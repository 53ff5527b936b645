"""Embedders that many threads and knowledge bases share: one per name, one call at a time."""

import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvweave.app.library.library import OpenEmbedder
from kvweave.corpus.embedder import Embedder, Vectors


class Embedded(NamedTuple):
    vectors: Vectors  # [N, D]
    num_tokens: int  # read, over all texts


class SharedEmbedder:
    """An embedder that many threads use, one call at a time."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._turn = threading.Lock()
        self.name = embedder.name

    @property
    def identity(self) -> str:
        with self._turn:
            return self._embedder.identity

    @property
    def dim(self) -> int:
        with self._turn:
            return self._embedder.dim

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        with self._turn:
            return self._embedder.embed_passages(texts)

    def embed_query(self, text: str) -> Vectors:
        with self._turn:
            return self._embedder.embed_query(text)

    def num_tokens(self, text: str) -> int:
        with self._turn:
            return self._embedder.num_tokens(text)

    def embed(self, texts: Sequence[str], *, as_query: bool) -> Embedded:
        import numpy as np

        if not as_query:
            vectors = self.embed_passages(texts)
        else:
            vectors = np.stack([self.embed_query(text) for text in texts])
        return Embedded(vectors, sum(map(self.num_tokens, texts)))


class Embedders:
    """One embedder per name, made on first use."""

    def __init__(self, open_embedder: OpenEmbedder) -> None:
        self._open_embedder = open_embedder
        self._lock = threading.Lock()
        self._made: dict[str, SharedEmbedder] = {}

    def get(self, name: str) -> SharedEmbedder:
        with self._lock:
            if name not in self._made:
                self._made[name] = SharedEmbedder(self._open_embedder(name))
            return self._made[name]
