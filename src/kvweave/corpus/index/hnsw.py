"""Walks a graph of neighbours: fastest search, slowest to build, most memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvweave.corpus.index.base import (
    Ids,
    IndexHits,
    Vector,
    Vectors,
    check_query,
    efforts,
    nothing,
    one_thread,
    ordered,
)
from kvweave.corpus.index.rows import IndexRows

if TYPE_CHECKING:
    import faiss

NEIGHBOURS = 32  # edges per vector
BUILD_EFFORT = 128  # candidates kept while linking a new vector
SEARCH_EFFORT = 128  # candidates kept by a plain search; see bench/retrieval.py


class HnswIndex:
    """A FAISS HNSW index. A staged search walks twice: with a quarter of the effort, then with all.

    FAISS hands out no walk that could go on. One of our own over its graph would, but in numpy it
    takes almost three times as long as these two together: docs/corpus.md has the figures.
    """

    kind = "hnsw"
    shared = False
    learns_from_first_add = False

    def __init__(
        self,
        dim: int,
        *,
        faiss_index: "faiss.IndexHNSWFlat | None" = None,
        rows: IndexRows | None = None,
        effort: int = SEARCH_EFFORT,
    ) -> None:
        import faiss

        self.dim = dim
        if faiss_index is None:
            faiss_index = faiss.IndexHNSWFlat(dim, NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
            faiss_index.hnsw.efConstruction = BUILD_EFFORT
        self.faiss_index = faiss_index
        self.rows = rows or IndexRows()
        self.effort = effort

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self) -> Ids:
        return self.rows.live_ids

    def add(self, ids: Ids, vectors: Vectors) -> None:
        fresh = self.rows.unseen(ids)
        if fresh.any():
            self.faiss_index.add(np.ascontiguousarray(vectors[fresh], np.float32))
            self.rows.append(ids[fresh])

    def remove(self, ids: Ids) -> None:
        self.rows.bury(ids)

    @property
    def wants_rebuild(self) -> bool:
        return self.rows.too_many_dead

    def search(self, vector: Vector, k: int) -> IndexHits:
        query = check_query(vector, self.dim, k)
        return self._walk(query, k, self._full_effort(k))

    def search_staged(self, vector: Vector, k: int, stages: int) -> Iterator[IndexHits]:
        query = check_query(vector, self.dim, k, stages)
        for effort in efforts(self._full_effort(k), k, stages):
            yield self._walk(query, k, effort)

    def num_stages(self, k: int, stages: int) -> int:
        return len(efforts(self._full_effort(k), k, stages))

    def _full_effort(self, k: int) -> int:
        return max(self.effort, 2 * k)

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
        return ordered(self.rows.by_row[found[0][real]], scores[0][real], k)
