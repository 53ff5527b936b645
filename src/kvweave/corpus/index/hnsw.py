"""Walks a graph of neighbours: fastest search, slowest to build, most memory."""

from typing import Any

import numpy as np

from kvweave.corpus.index.base import (
    GraphIndex,
    IndexHits,
    Vectors,
    nothing,
    take_best,
)
from kvweave.corpus.index.faiss_index import FaissIndex, one_thread

NEIGHBOURS = 32  # edges per vector
BUILD_EFFORT = 128  # candidates kept while linking a new vector


class HnswIndex(GraphIndex, FaissIndex):
    """A FAISS HNSW index. A staged search walks twice: with a quarter of the effort, then with all.

    FAISS hands out no walk that could go on. One of our own over its graph would, but in numpy it
    takes almost three times as long as these two together: docs/corpus.md has the figures.
    """

    kind = "hnsw"

    def _make(self) -> Any:
        import faiss

        index = faiss.IndexHNSWFlat(self.dim, NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = BUILD_EFFORT
        return index

    def _walk(self, query: Vectors, k: int, effort: int) -> IndexHits:
        import faiss

        if not len(self.rows):
            return nothing()
        settings = faiss.SearchParametersHNSW(efSearch=effort)
        if self.rows.num_dead:
            # The walk may pass through tombstones but keeps none.
            live = np.packbits(~self.rows.dead, bitorder="little")
            selector = faiss.IDSelectorBitmap(live)  # FAISS keeps a bare pointer: hold on to it
            settings.sel = selector
        with one_thread():
            scores, found = self.faiss_index.search(query, k, params=settings)
        real = found[0] >= 0
        return take_best(self.rows.by_row[found[0][real]], scores[0][real], k)
